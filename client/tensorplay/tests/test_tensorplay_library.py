"""The mirror of gradsync/gradsync.h is the header's."""

from __future__ import annotations

import ctypes
import re
import subprocess
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

from gradsync.errors import ERROR_CLASSES
from gradsync.tensorplay import _library

INCLUDE = Path(__file__).parents[2] / "include"
HEADER = INCLUDE / "gradsync" / "gradsync.h"

STRUCTURES: dict[str, type[ctypes.Structure]] = {
    "gradsync_error": _library.Error,
    "gradsync_session_options": _library.SessionOptions,
    "gradsync_parameter": _library.Parameter,
    "gradsync_ddp_options": _library.DdpOptions,
    "gradsync_slot": _library.Slot,
    "gradsync_bucket": _library.Bucket,
}
OPAQUE: dict[str, type[ctypes.Structure]] = {
    "gradsync_session": _library.SessionHandle,
    "gradsync_group": _library.GroupHandle,
    "gradsync_buffer": _library.BufferHandle,
    "gradsync_ddp": _library.DdpHandle,
}
SCALARS: dict[str, Any] = {
    "int": ctypes.c_int,
    "uint32_t": ctypes.c_uint32,
    "uint64_t": ctypes.c_uint64,
    "gradsync_dtype": ctypes.c_int,
    "gradsync_unused_policy": ctypes.c_int,
}


def constants() -> dict[str, int]:
    """What the mirror says, by the header's names."""
    values = {"GRADSYNC_MAX_DIMS": _library.MAX_DIMS}
    values |= {f"GRADSYNC_{member.name}": member.value for member in _library.DType}
    values |= {f"GRADSYNC_UNUSED_{member.name}": member.value for member in _library.UnusedPolicy}
    values |= {f"GRADSYNC_{error.name}": code for code, error in ERROR_CLASSES.items()}
    for name, structure in STRUCTURES.items():
        values[f"sizeof({name})"] = ctypes.sizeof(structure)
        for field, *_ in structure._fields_:
            descriptor = getattr(structure, field)
            values[f"offsetof({name}, {field})"] = descriptor.offset
            values[f"sizeof((({name}*)0)->{field})"] = descriptor.size
    values |= {f"sizeof({name})": ctypes.sizeof(type_) for name, type_ in SCALARS.items()}
    return values


def evaluate(expressions: Iterable[str], folder: Path) -> dict[str, int]:
    """As a C compiler sees them."""
    lines = [f'  printf("%lld\\n", (long long)({text}));' for text in expressions]
    source = folder / "constants.c"
    source.write_text(
        "#include <stdio.h>\n#include <gradsync/gradsync.h>\nint main(void) {\n"
        + "\n".join(lines)
        + "\n  return 0;\n}\n"
    )
    program = folder / "constants"
    options = [f"-I{INCLUDE}", "-o", str(program)]
    subprocess.run(["gcc", "-std=c11", str(source), *options], check=True)
    printed = subprocess.run([program], check=True, capture_output=True, text=True).stdout
    return dict(zip(expressions, map(int, printed.split()), strict=True))


def test_constants_and_structures_are_the_headers(tmp_path: Path) -> None:
    ours = constants()
    assert evaluate(ours, tmp_path) == ours


def preprocessed() -> str:
    command = ["gcc", "-std=c11", "-E", "-P", f"-I{INCLUDE}", str(HEADER)]
    text = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    return re.sub(r"\s+", " ", text)


@pytest.mark.parametrize(
    ("enumeration", "prefix", "mirror"),
    [
        ("gradsync_dtype", "GRADSYNC_", _library.DType),
        ("gradsync_unused_policy", "GRADSYNC_UNUSED_", _library.UnusedPolicy),
    ],
)
def test_no_constant_is_left_out(enumeration: str, prefix: str, mirror: Any) -> None:
    found = re.search(rf"enum {enumeration} {{(.*?)}}", preprocessed())
    assert found is not None
    names = re.findall(r"(\w+) =", found[1])
    assert names == [f"{prefix}{member.name}" for member in mirror]


def test_no_field_is_left_out() -> None:
    text = preprocessed()
    for name, structure in STRUCTURES.items():
        found = re.search(rf"struct {name} {{(.*?)}}", text)
        assert found is not None
        fields = re.findall(r"(\w+)(?:\[[^\]]*\])?;", found[1])
        assert fields == [field for field, *_ in structure._fields_]


def to_ctypes(text: str) -> Any:
    """The type of a declaration such as `const uint32_t* ranks`, or of a result."""
    words = re.findall(r"\w+|\*", text.replace("const ", ""))
    name, stars = words[0], words.count("*")
    if stars == 0:
        return None if name == "void" else SCALARS[name]
    if name in ("void", "char"):
        pointed: Any = ctypes.c_void_p if name == "void" else ctypes.c_char_p
        stars -= 1
    else:
        pointed = (SCALARS | STRUCTURES | OPAQUE)[name]
    for _ in range(stars):
        pointed = ctypes.POINTER(pointed)
    return pointed


def test_functions_are_the_headers() -> None:
    prototypes = {
        name: (result, arguments.split(","))
        for result, name, arguments in re.findall(
            r"((?:const )?\w+\*?) (gradsync_\w+)\(([^()]*)\);",
            re.sub(r"__attribute__\(\(.*?\)\)\)", "", preprocessed()),
        )
    }
    for name, signature in _library.FUNCTIONS.items():
        result, arguments = prototypes[name]
        assert (to_ctypes(result), *map(to_ctypes, arguments)) == signature, name


def test_a_library_that_is_not_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("GRADSYNC_LIBRARY", "/nowhere/libgradsync.so.0")
    with pytest.raises(ImportError, match="set GRADSYNC_LIBRARY to its path"):
        _library._load()
