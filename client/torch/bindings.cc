// The Python module gradsync.torch._C. Its classes are described in _C.pyi.
#include <pybind11/chrono.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <torch/csrc/utils/pybind.h>

#include <memory>
#include <string>
#include <vector>

#include "client/torch/broadcaster.h"
#include "client/torch/errors.h"
#include "client/torch/process_group.h"
#include "client/torch/reducer.h"
#include "client/torch/session.h"

namespace gradsync::torch {
namespace {

namespace py = pybind11;
using Unlocked = py::call_guard<py::gil_scoped_release>;

void BindSession(py::module_& module) {
  py::class_<Session, std::shared_ptr<Session>>(module, "Session")
      .def(py::init([](std::string job, uint32_t generation, uint32_t world_size, uint32_t rank,
                       uint32_t local_rank, uint32_t local_world_size, Timeout timeout) {
             return std::make_shared<Session>(Session::Options{std::move(job), generation,
                                                               world_size, rank, local_rank,
                                                               local_world_size, timeout});
           }),
           py::kw_only(), py::arg("job"), py::arg("generation"), py::arg("world_size"),
           py::arg("rank"), py::arg("local_rank"), py::arg("local_world_size"), py::arg("timeout"),
           Unlocked())
      .def("close", &Session::Close, Unlocked())
      .def_property_readonly("closed", &Session::closed)
      .def_property_readonly("job", &Session::job)
      .def_property_readonly("rank", &Session::rank)
      .def_property_readonly("world_size", &Session::world_size)
      .def_property_readonly("socket", &Session::socket);
}

void BindProcessGroup(py::module_& module) {
  py::class_<ProcessGroupGradsync, c10d::Backend, c10::intrusive_ptr<ProcessGroupGradsync>>(
      module, "ProcessGroupGradsync")
      .def(py::init([](std::shared_ptr<Session> session, const std::string& group_name,
                       const std::vector<uint32_t>& ranks, int rank, Timeout timeout,
                       bool owns_session) {
             return c10::make_intrusive<ProcessGroupGradsync>(std::move(session), group_name, ranks,
                                                              rank, timeout, owns_session);
           }),
           py::kw_only(), py::arg("session"), py::arg("group_name"), py::arg("ranks"),
           py::arg("rank"), py::arg("timeout"), py::arg("owns_session"), Unlocked())
      .def_property_readonly("session", &ProcessGroupGradsync::session);
}

void BindBroadcaster(py::module_& module) {
  py::class_<Broadcaster>(module, "Broadcaster")
      .def(py::init<std::shared_ptr<Session>, const std::string&, const std::vector<uint32_t>&,
                    Timeout>(),
           py::arg("session"), py::arg("tag"), py::arg("ranks"), py::arg("timeout"), Unlocked())
      .def("broadcast", &Broadcaster::Broadcast, py::arg("tensors"), py::arg("chunk_bytes"),
           py::arg("root"), Unlocked())
      .def(
          "all_gather",
          [](Broadcaster& self, const std::string& text) {
            std::vector<py::bytes> texts;
            std::vector<std::string> gathered;
            {
              const py::gil_scoped_release released;
              gathered = self.AllGather(text);
            }
            for (const std::string& one : gathered) texts.emplace_back(one);
            return texts;
          },
          py::arg("text"));
}

// Under the names by which torch's DistributedDataParallel calls its own reducer.
void BindReducer(py::module_& module) {
  py::class_<Reducer>(module, "Reducer")
      .def(
          py::init([](std::shared_ptr<Session> session, const std::string& tag,
                      const std::vector<uint32_t>& ranks, const std::vector<at::Tensor>& parameters,
                      const std::vector<std::string>& names, uint64_t bucket_bytes,
                      uint64_t first_bucket_bytes, Timeout timeout, bool gradient_as_bucket_view) {
            return std::make_unique<Reducer>(std::move(session), tag, ranks, parameters, names,
                                             Reducer::Options{bucket_bytes, first_bucket_bytes,
                                                              timeout, gradient_as_bucket_view});
          }),
          py::kw_only(), py::arg("session"), py::arg("tag"), py::arg("ranks"),
          py::arg("parameters"), py::arg("names"), py::arg("bucket_bytes"),
          py::arg("first_bucket_bytes"), py::arg("timeout"), py::arg("gradient_as_bucket_view"),
          Unlocked())
      .def("prepare_for_forward", &Reducer::PrepareForForward, Unlocked())
      .def("_rebuild_buckets", &Reducer::RebuildBuckets, Unlocked())
      .def(
          "prepare_for_backward",
          [](Reducer& self, const py::list& /*outputs*/) {
            const py::gil_scoped_release released;
            self.PrepareForBackward();
          },
          py::arg("outputs"))
      .def("_check_reducer_finalized", &Reducer::CheckFinalized, Unlocked())
      .def("_remove_autograd_hooks", &Reducer::RemoveHooks, Unlocked())
      .def_property_readonly("bucket_bytes", &Reducer::BucketBytes)
      .def_property_readonly("iterations", &Reducer::iterations)
      .def_property_readonly("error", &Reducer::error);
}

}  // namespace

PYBIND11_MODULE(TORCH_EXTENSION_NAME, module) {
  // Defines torch's classes, which ours derive from.
  py::module_::import("torch");
  BindErrors();
  BindSession(module);
  BindProcessGroup(module);
  BindBroadcaster(module);
  BindReducer(module);
  module.def("version", &gradsync_version);
}

}  // namespace gradsync::torch
