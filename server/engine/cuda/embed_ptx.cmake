# cmake -DPTX=file -DOUT=file.cc -P embed_ptx.cmake: the file as a string (kernels_ptx.h).
file(READ "${PTX}" text)
file(WRITE "${OUT}" "#include \"server/engine/cuda/kernels_ptx.h\"

namespace gradsync::cuda {
const char kKernelsPtx[] = R\"ptx(${text})ptx\";
}  // namespace gradsync::cuda
")
