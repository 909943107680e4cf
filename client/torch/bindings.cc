// The Python module gradsync.torch._C. Its classes are described in _C.pyi.
#include <pybind11/chrono.h>
#include <pybind11/pybind11.h>
#include <pybind11/stl.h>
#include <torch/csrc/distributed/c10d/python_comm_hook.h>
#include <torch/csrc/utils/pybind.h>

#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "client/torch/broadcaster.h"
#include "client/torch/comm_hook.h"
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
  py::enum_<gradsync_aside_policy>(module, "AsidePolicy")
      .value("AVERAGE_OVER_ALL", GRADSYNC_ASIDE_AVERAGE_OVER_ALL)
      .value("AVERAGE_OVER_PRESENT", GRADSYNC_ASIDE_AVERAGE_OVER_PRESENT)
      .value("FORBID", GRADSYNC_ASIDE_FORBID);
  py::class_<Broadcaster>(module, "Broadcaster")
      .def(py::init<std::shared_ptr<Session>, const std::string&, const std::vector<uint32_t>&,
                    Timeout, const std::string&>(),
           py::arg("session"), py::arg("tag"), py::arg("ranks"), py::arg("timeout"),
           py::arg("backend"), Unlocked())
      .def("broadcast", &Broadcaster::Broadcast, py::arg("tensors"), py::arg("chunk_bytes"),
           py::arg("root"), Unlocked())
      .def("stand_aside", &Broadcaster::StandAside, py::arg("policy"), Unlocked())
      .def("rejoin", &Broadcaster::Rejoin, Unlocked())
      .def(
          "all_gather",
          [](Broadcaster& self, const std::string& text) {
            std::vector<py::bytes> texts;
            std::vector<std::string> gathered;
            {
              const py::gil_scoped_release released;
              gathered = self.AllGather(text);
            }
            texts.reserve(gathered.size());
            for (const std::string& one : gathered) texts.emplace_back(one);
            return texts;
          },
          py::arg("text"));
}

// `object`, to be dropped on whatever thread, with or without the interpreter's lock.
std::shared_ptr<py::object> Keep(py::object object) {
  return {new py::object(std::move(object)), [](py::object* kept) {
            const py::gil_scoped_acquire acquired;
            delete kept;
          }};
}

std::unique_ptr<Reducer> MakeReducer(
    std::shared_ptr<Session> session, const std::string& tag, const std::vector<uint32_t>& ranks,
    const std::vector<at::Tensor>& parameters, const std::vector<std::string>& names,
    uint64_t bucket_bytes, uint64_t first_bucket_bytes, std::vector<uint64_t> bucket_bytes_list,
    Timeout timeout, bool gradient_as_bucket_view, bool find_unused, bool skip_unused,
    std::vector<uint8_t> sparse, std::optional<at::ScalarType> gradient_type, std::string backend) {
  return std::make_unique<Reducer>(
      std::move(session), tag, ranks, parameters, names,
      Reducer::Options{bucket_bytes, first_bucket_bytes, std::move(bucket_bytes_list), timeout,
                       gradient_as_bucket_view, find_unused, skip_unused, std::move(sparse),
                       gradient_type, std::move(backend)});
}

void BindReducerSettings(py::class_<Reducer>& reducer) {
  reducer.def("_set_static_graph", &Reducer::SetStaticGraph, Unlocked())
      .def(
          "_register_comm_hook",
          [](Reducer& self, py::object state, py::object hook) {
            auto made = std::make_unique<c10d::PythonCommHook>(std::move(state), std::move(hook));
            self.SetHook(std::move(made));
          },
          py::arg("state"), py::arg("hook"))
      .def(
          "_register_half_precision_hook",
          [](Reducer& self, c10::intrusive_ptr<c10d::ProcessGroup> group) {
            self.SetHook(MakeHalfPrecisionHook(std::move(group)));
          },
          py::arg("group"))
      .def("_set_optimizer_in_backward", &Reducer::SetOptimizerInBackward)
      .def("_set_manual_finalization_required", &Reducer::SetManualFinish, py::arg("required"));
}

void BindReducerSteps(py::class_<Reducer>& reducer) {
  reducer.def("prepare_for_forward", &Reducer::PrepareForForward, Unlocked())
      .def("rebuild_buckets", &Reducer::RebuildBuckets, py::arg("together"), Unlocked())
      .def("prepare_for_backward", &Reducer::PrepareForBackward, py::arg("outputs"), Unlocked())
      .def("_autograd_hook", &Reducer::OnGradient, py::arg("index"), Unlocked())
      .def("_finalize_backward_manual", &Reducer::FinishBackward, Unlocked())
      .def("stand_aside", &Reducer::StandAside, py::arg("policy"), Unlocked())
      .def("rejoin", &Reducer::Rejoin, Unlocked())
      .def("run_empty_iteration", &Reducer::RunEmptyIteration, Unlocked())
      .def("average_over_living", &Reducer::AverageOverLiving, py::arg("living"))
      .def(
          "call_at_end",
          [](Reducer& self, py::object call) {
            self.CallAtEnd([kept = Keep(std::move(call))] {
              const py::gil_scoped_acquire acquired;
              (*kept)();
            });
          },
          py::arg("call"))
      .def("_check_reducer_finalized", &Reducer::CheckFinalized, Unlocked())
      .def("_remove_autograd_hooks", &Reducer::RemoveHooks, Unlocked());
}

py::dict TimesOf(const Reducer& reducer) {
  const Reducer::Times times = reducer.times();
  py::dict dict;
  dict["forward_begin"] = times.forward_begin;
  dict["backward_begin"] = times.backward_begin;
  dict["first_bucket"] = times.first_bucket;
  dict["last_gradient"] = times.last_gradient;
  dict["end"] = times.end;
  return dict;
}

// Under the names by which torch's DistributedDataParallel calls its own reducer, where it does.
void BindReducer(py::module_& module) {
  py::class_<Reducer> reducer(module, "Reducer");
  reducer.def(py::init(&MakeReducer), py::kw_only(), py::arg("session"), py::arg("tag"),
              py::arg("ranks"), py::arg("parameters"), py::arg("names"), py::arg("bucket_bytes"),
              py::arg("first_bucket_bytes"), py::arg("bucket_bytes_list"), py::arg("timeout"),
              py::arg("gradient_as_bucket_view"), py::arg("find_unused"), py::arg("skip_unused"),
              py::arg("sparse"), py::arg("gradient_type"), py::arg("backend"), Unlocked());
  BindReducerSettings(reducer);
  BindReducerSteps(reducer);
  reducer.def_property_readonly("recorded_static_graph", &Reducer::recorded_static_graph)
      .def("_should_finalize_after_backward", &Reducer::needs_manual_finish)
      .def_property_readonly("found_same_unused", &Reducer::found_same_unused)
      .def_property_readonly("used_by", &Reducer::UsedBy)
      .def_property_readonly("bucket_bytes", &Reducer::BucketBytes)
      .def_property_readonly("bucket_parameters", &Reducer::BucketParameters)
      .def_property_readonly("ready_order", &Reducer::ReadyOrder)
      .def_property_readonly("reduced_buckets", &Reducer::ReducedBuckets)
      .def_property_readonly("times", &TimesOf)
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
