#include "client/torch/reducer.h"

#include <ATen/core/grad_mode.h>
#include <ATen/record_function.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/utils/lambda_post_hook.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <mutex>
#include <optional>
#include <utility>

#include "client/torch/comm_hook.h"
#include "client/torch/device.h"
#include "client/torch/errors.h"
#include "client/torch/future_wait.h"
#include "client/torch/gradient_slot.h"
#include "client/torch/graph_walk.h"
#include "client/torch/interpreter.h"
#include "client/torch/profiler_events.h"
#include "client/torch/sparse_average.h"
#include "client/torch/tensors.h"

namespace gradsync::torch {
namespace {

namespace autograd = ::torch::autograd;
using Accumulator = decltype(autograd::impl::grad_accumulator(std::declval<at::Tensor>()));

// For smaller gradients a copy costs less than a new tensor.
constexpr size_t kMinLoanBytes = 16 * 1024;
// Each may leave all memory of the ddp behind with a single gradient that somebody keeps.
constexpr int kMaxRenewals = 2;

int64_t Now() {
  return std::chrono::duration_cast<std::chrono::nanoseconds>(
             std::chrono::steady_clock::now().time_since_epoch())
      .count();
}

}  // namespace

class Reducer::State : public std::enable_shared_from_this<State> {
 public:
  State(std::shared_ptr<Session> session, const std::string& tag,
        const std::vector<uint32_t>& ranks, const std::vector<at::Tensor>& parameters,
        std::vector<std::string> names, const Options& options)
      : parameters_(parameters),
        device_(parameters.empty() ? at::kCPU : parameters.front().device()),
        names_(std::move(names)),
        as_view_(options.gradient_as_bucket_view && !options.gradient_type),
        find_unused_(options.find_unused),
        skip_unused_(options.skip_unused),
        gradient_type_(options.gradient_type),
        timeout_(options.timeout),
        sparse_(options.sparse),
        stored_(parameters.size()),
        used_(parameters.size()),
        loans_(parameters.size()),
        bucket_events_(options.backend),
        broadcast_title_(options.backend + ":broadcast"),
        group_(std::move(session), tag, ranks, options.timeout) {
    tells_use_ = find_unused_;
    Create(options);
    ReadPlan();
  }

  void AddHooks();
  void RemoveHooks();
  void SetStaticGraph();
  void SetHook(std::unique_ptr<c10d::CommHookInterface> hook);
  void SetOptimizerInBackward() { optimizer_in_backward_ = true; }
  void SetManualFinish(bool manual);
  void PrepareForForward();
  bool RebuildBuckets(bool together);
  void PrepareForBackward(const std::vector<at::Tensor>& outputs);
  void OnGradient(uint32_t index, const autograd::variable_list& inputs);
  void FinishBackward();
  void StandAside(gradsync_aside_policy policy);
  uint32_t Rejoin();
  void RunEmptyIteration();
  void AverageOverLiving(c10::intrusive_ptr<c10d::Work> living) { living_ = std::move(living); }
  void CallAtEnd(std::function<void()> call) { calls_at_end_.push_back(std::move(call)); }
  void CheckFinalized() const;
  bool recorded_static_graph() const { return recorded_; }
  bool needs_manual_finish() const { return manual_ && is_static_ && !recorded_; }
  bool found_same_unused() const { return same_unused_; }
  std::vector<int32_t> UsedBy() const;
  std::vector<uint64_t> BucketBytes() const;
  const std::vector<std::vector<uint32_t>>& buckets() const { return buckets_; }
  const std::vector<uint32_t>& ready_order() const { return ready_order_; }
  uint32_t reduced_buckets() const {
    return static_cast<uint32_t>(std::count(skipped_.begin(), skipped_.end(), 0));
  }
  Times times() const { return times_; }
  uint64_t iterations() const { return iterations_; }
  std::string error() const {
    const std::lock_guard lock(mutex_);
    return error_;
  }

 private:
  struct Hook {
    Accumulator accumulator;  // a parameter holds its own only weakly
    uintptr_t key = 0;
  };

  void Create(const Options& options);
  void ReadSlots();
  void ReadPlan();
  at::ScalarType TypeOf(uint32_t index) const {
    return gradient_type_.value_or(parameters_[index].scalar_type());
  }
  bool IsSparse(uint32_t index) const { return !sparse_.empty() && sparse_[index] != 0; }
  void Call(int code, const gradsync_error& error);
  [[noreturn]] void Refuse(const std::string& text) const;
  void CheckHooks() const;
  void UseCurrentStream();
  void Begin();
  void FindUnused(const std::vector<at::Tensor>& outputs);
  void WatchOutputs(const std::vector<at::Tensor>& outputs);

  // On autograd's threads, in the order in which a backward calls them.
  void OnOutput();
  void Record(uint32_t index);
  void BeginBackward();
  void FinishFirstBackward();
  void SkipUnusedBuckets();
  void HandOver(uint32_t index, const autograd::variable_list& inputs);
  void ShowProfiler(uint32_t bucket);
  void Store(uint32_t index, const autograd::variable_list& inputs);
  void StoreUnused(uint32_t index);
  void GiveReadyBuckets();
  void AllReady();
  void Finish();
  void TakeBucket(uint32_t bucket, double scale);
  void TakeHookedBucket(uint32_t bucket);
  void TakeSparse(bool put_back, double scale);
  void Restore(uint32_t index);
  void RestoreUnused(uint32_t index);
  void LeaveSlots();
  void PutBack(uint32_t index);
  void PutBackTogether();
  void ReplaceGradient(uint32_t index, const at::Tensor& by);
  double ScaleToLiving();
  bool IsUsedHere(uint32_t index) const { return !may_be_unused() || used_[index] != 0; }
  bool may_be_unused() const { return find_unused_ || is_static_; }
  size_t HookedBucketCount() const { return buckets_.size() + sparse_buckets_.size(); }
  at::Tensor BucketTensor(uint32_t bucket) const;

  // Lending, see below.
  bool MayLend(uint32_t index, const at::Tensor& gradient,
               const autograd::variable_list& inputs = {}) const;
  at::Tensor Lend(uint32_t index);
  bool IsKept(uint32_t index) const;
  void TakeBack();

  const std::vector<at::Tensor> parameters_;
  const c10::Device device_;  // of all of them
  const std::vector<std::string> names_;
  const bool as_view_;
  const bool find_unused_;
  const bool skip_unused_;
  const std::optional<at::ScalarType> gradient_type_;
  const Timeout timeout_;
  const std::vector<uint8_t> sparse_;           // by parameter; empty: none is
  std::vector<uint32_t> sparse_buckets_;        // the sparse parameters
  std::vector<gradsync_slot> slots_;            // by parameter
  std::vector<at::Tensor> views_;               // by parameter: its slot
  std::vector<std::vector<uint32_t>> buckets_;  // by bucket: its parameters
  std::vector<Hook> hooks_;
  std::vector<uint8_t> stored_;  // by parameter: its slot is handed over, or will be
  std::vector<uint32_t> ready_order_;

  // Where parameters may be unused: those of the coming backward, and what is to be put back if no
  // rank turns out to have used them. By parameter, whether this rank has, also while it only
  // accumulated.
  GraphWalk walk_;
  std::vector<uint32_t> unused_;
  std::vector<uint8_t> used_;
  std::vector<std::pair<uint32_t, at::Tensor>> saved_;
  bool tells_use_ = false;  // whether used_ is being written
  bool same_unused_ = true;
  bool walked_ = false;
  std::vector<uint8_t> skipped_;  // by bucket

  // A static graph: how often each parameter's hook fires. Recorded in the first synchronised
  // backward, in which nothing is handed over before its end.
  bool is_static_ = false;
  std::atomic<bool> recorded_{false};
  std::vector<uint32_t> firings_;        // by parameter
  std::vector<uint32_t> firings_left_;   // in this iteration
  std::vector<uint32_t> first_firings_;  // the parameters in order

  // On a GPU: the stream that the ddp was told last, and the gradients that are to be copied from
  // their slots, all at once.
  std::optional<c10::Stream> stream_;
  std::vector<at::Tensor> gradients_to_fill_;
  std::vector<at::Tensor> averages_;

  std::unique_ptr<HookedBuckets> hooked_;
  bool optimizer_in_backward_ = false;
  bool manual_ = false;
  bool awaits_finish_ = false;  // manual_, and all gradients were handed over
  c10::intrusive_ptr<c10d::Work> living_;
  std::vector<std::function<void()>> calls_at_end_;
  Times times_;
  // Without gradient_as_bucket_view a gradient is the user's own: nothing that is kept may change
  // later. That does not always take a copy. Where autograd has made a new gradient, which nobody
  // else has seen, its place can be taken by a tensor whose memory is the slot: the slot is lent.
  // By the next backward that tensor is usually gone (zero_grad), or is still the parameter's
  // gradient, to which autograd adds in place, as it would to any. If anything else has kept it (or
  // a view or array of it), the ddp gets other memory, and that parameter's average is copied out
  // from then on; after a few times, every parameter's.
  struct Loan {
    bool allowed = true;
    std::optional<c10::weak_intrusive_ptr<c10::StorageImpl>> storage;  // the last
  };
  std::vector<Loan> loans_;  // by parameter
  bool lending_ = false;
  bool begun_ = false;  // handing over in this iteration
  int renewals_ = 0;
  std::atomic<bool> armed_{false};
  bool forward_synced_ = false;
  bool may_rebuild_ = true;
  std::atomic<uint64_t> iterations_{0};
  BucketEvents bucket_events_;
  const std::string broadcast_title_;
  // Makes the hooks' calls of gradsync_ddp_ready not overlap. Nothing of torch's or Python's is
  // called under it.
  mutable std::mutex mutex_;
  mutable std::string error_;  // under mutex_

  struct Destroy {
    void operator()(gradsync_ddp* ddp) const {
      const WithoutInterpreter released;  // it may have to tell the daemon
      gradsync_ddp_destroy(ddp);
    }
  };
  Group group_;
  std::unique_ptr<gradsync_ddp, Destroy> ddp_;
};

void Reducer::State::Create(const Options& options) {
  std::vector<gradsync_parameter> descriptions;
  descriptions.reserve(parameters_.size());
  for (uint32_t i = 0; i < parameters_.size(); ++i) {
    CheckDense(parameters_[i], "DistributedDataParallel");
    TORCH_CHECK_VALUE(parameters_[i].device() == device_,
                      "gradsync: DistributedDataParallel needs parameters on one device, but \"",
                      names_[i], "\" is on ", parameters_[i].device(), " and \"", names_[0],
                      "\" on ", device_);
    gradsync_parameter& description =
        descriptions.emplace_back(Describe(parameters_[i], names_[i], TypeOf(i)));
    if (!IsSparse(i)) continue;
    // Its rows are averaged apart, so it has no place in a bucket, but takes part in the rest.
    description.ndim = 1;
    description.shape[0] = 0;
    sparse_buckets_.push_back(i);
  }
  gradsync_ddp_options raw{};
  raw.struct_size = sizeof(raw);
  raw.bucket_bytes = options.bucket_bytes;
  raw.first_bucket_bytes = options.first_bucket_bytes;
  raw.timeout_ms = Milliseconds(options.timeout);
  // As torch's, so that the same buckets go unused; and the plan stays, so that the small bucket is
  // best the last.
  raw.fill_from_front = find_unused_ ? 1 : 0;
  if (!options.bucket_bytes_list.empty()) {
    raw.bucket_bytes_list = options.bucket_bytes_list.data();
    raw.bucket_bytes_count = static_cast<uint32_t>(options.bucket_bytes_list.size());
  }
  gradsync_error error{};
  gradsync_ddp* ddp = nullptr;
  Check(gradsync_ddp_create(group_.handle(), descriptions.data(),
                            static_cast<uint32_t>(descriptions.size()), &raw, &ddp, &error),
        error);
  ddp_.reset(ddp);
  if (find_unused_) Check(gradsync_ddp_set_unused_policy(ddp, GRADSYNC_UNUSED_FIND, &error), error);
}

// Throws what a call of libgradsync has reported, and remembers it.
void Reducer::State::Call(int code, const gradsync_error& error) {
  if (code == GRADSYNC_OK) return;
  {
    const std::lock_guard lock(mutex_);
    error_ = error.message;
  }
  throw Error(code, error.message);
}

// As Call, of a fault that was found here.
void Reducer::State::Refuse(const std::string& text) const {
  {
    const std::lock_guard lock(mutex_);
    error_ = text;
  }
  throw Error(GRADSYNC_FAILED_PRECONDITION, text);
}

// Makes the views of the slots where they are now.
void Reducer::State::ReadSlots() {
  gradsync_error error{};
  views_.clear();
  slots_.resize(parameters_.size());
  for (uint32_t i = 0; i < parameters_.size(); ++i) {
    slots_[i] = {};
    Call(gradsync_ddp_slot(ddp_.get(), i, &slots_[i], &error), error);
    views_.push_back(IsSparse(i) ? at::empty({0}, at::TensorOptions(device_).dtype(TypeOf(i)))
                                 : ViewOf(slots_[i], parameters_[i], TypeOf(i)));
  }
}

// As ReadSlots, where buckets have changed too. Gradients that lie in their old slots move along:
// libgradsync has copied the contents.
void Reducer::State::ReadPlan() {
  const std::vector<at::Tensor> old_views = views_;
  ReadSlots();
  for (uint32_t i = 0; as_view_ && i < old_views.size(); ++i) {
    at::Tensor& gradient = parameters_[i].mutable_grad();
    if (gradient.defined() && !IsSparse(i) && IsAlias(gradient, old_views[i])) gradient = views_[i];
  }
  gradsync_error error{};
  buckets_.clear();
  for (uint32_t i = 0; i < gradsync_ddp_bucket_count(ddp_.get()); ++i) {
    gradsync_bucket bucket{};
    Call(gradsync_ddp_bucket(ddp_.get(), i, &bucket, &error), error);
    buckets_.emplace_back(bucket.parameters, bucket.parameters + bucket.parameter_count);
  }
  skipped_.assign(buckets_.size(), 0);
}

void Reducer::State::AddHooks() {
  if (gradient_type_) return;  // forward runs on copies
  hooks_.reserve(parameters_.size());
  for (uint32_t i = 0; i < parameters_.size(); ++i) {
    Hook hook;
    hook.accumulator = autograd::impl::grad_accumulator(parameters_[i]);
    hook.key = hook.accumulator->add_post_hook(std::make_unique<autograd::utils::LambdaPostHook>(
        [state = shared_from_this(), i](const autograd::variable_list& outputs,
                                        const autograd::variable_list& inputs) {
          state->OnGradient(i, inputs);
          return outputs;
        },
        [](autograd::CompiledNodeArgs& /*args*/) {
          C10_THROW_ERROR(NotImplementedError,
                          "gradsync.torch.DistributedDataParallel does not work under compiled "
                          "autograd yet: leave torch._dynamo.config.compiled_autograd off");
        }));
    if (find_unused_) walk_.AddParameter(hook.accumulator.get());
    hooks_.push_back(std::move(hook));
  }
}

void Reducer::State::RemoveHooks() {
  armed_ = false;
  // A hook holds the state, so the state must let go of them first.
  for (Hook& hook : std::exchange(hooks_, {})) hook.accumulator->del_post_hook(hook.key);
}

void Reducer::State::CheckHooks() const {
  for (size_t i = 0; i < hooks_.size(); ++i) {
    if (autograd::impl::try_get_grad_accumulator(parameters_[i]) == hooks_[i].accumulator) continue;
    throw Error(GRADSYNC_FAILED_PRECONDITION,
                "parameter \"" + names_[i] +
                    "\" was converted or replaced after DistributedDataParallel had wrapped the "
                    "module (by .double(), .to() or the like), so its gradient is no longer seen; "
                    "convert the module first and wrap it then");
  }
}

void Reducer::State::SetStaticGraph() {
  if (iterations_ != 0 || armed_) {
    Refuse(
        "set_static_graph() should be called before training loop starts and after "
        "DistributedDataParallel is constructed.");
  }
  gradsync_error error{};
  Call(gradsync_ddp_set_unused_policy(ddp_.get(), GRADSYNC_UNUSED_STATIC, &error), error);
  is_static_ = true;
  tells_use_ = true;
  firings_.assign(parameters_.size(), 0);
}

void Reducer::State::SetHook(std::unique_ptr<c10d::CommHookInterface> hook) {
  if (iterations_ != 0 || armed_) {
    Refuse(
        "DDP communication hook can only be registered once and should be registered before "
        "calling backward.");
  }
  gradsync_error error{};
  Call(gradsync_ddp_reduce_elsewhere(ddp_.get(), &error), error);
  hooked_ = std::make_unique<HookedBuckets>(std::move(hook));
}

void Reducer::State::SetManualFinish(bool manual) {
  if (armed_ || awaits_finish_) {
    Refuse(
        "set_manual_finalization_required cannot be called after forward while a backward pass is "
        "expected or in progress. Call it before forward or after backward finalization.");
  }
  manual_ = manual;
}

// On a GPU: the ddp is to be told on which stream the gradients are made that come next, or that
// the averages are to be there for. Autograd has one stream for all parameters' hooks, but nothing
// keeps users from several: then each waits for the last, as a bucket is handed over with only one.
void Reducer::State::UseCurrentStream() {
  if (device_.is_cpu()) return;
  const c10::Stream current = CurrentStream(device_);
  if (stream_ == current) return;
  if (stream_) MakeWait(current, *stream_);
  stream_ = current;
  gradsync_error error{};
  int code = GRADSYNC_OK;
  {
    const std::lock_guard lock(mutex_);
    code = gradsync_ddp_set_stream(ddp_.get(), current.native_handle(), &error);
  }
  Call(code, error);
}

void Reducer::State::Begin() {
  armed_ = false;
  if (awaits_finish_) {
    Refuse(
        "Expected to have finalized the prior backward pass before starting a new one. Call "
        "finalize_backward() after backward() when require_manual_backward_finalization is true.");
  }
  if (is_static_ && !recorded_ && !first_firings_.empty()) {
    Refuse(
        "static_graph=True: the first backward gave gradients, but no tensor of what forward "
        "returned took part in it, so the gradients were not averaged. Return tensors, or lists, "
        "tuples, dicts or dataclasses of them, and compute the loss from these.");
  }
  gradsync_error error{};
  Call(gradsync_ddp_begin(ddp_.get(), &error), error);
  std::fill(stored_.begin(), stored_.end(), uint8_t{0});
  begun_ = false;
  ready_order_.clear();
  first_firings_.clear();
  saved_.clear();
  std::fill(skipped_.begin(), skipped_.end(), uint8_t{0});
  bucket_events_.Reset();
  times_.first_bucket = 0;
  if (hooked_) hooked_->Reset();
}

void Reducer::State::PrepareForForward() {
  CheckHooks();
  Begin();  // already here, so that what the last backward left out is reported before the forward
  forward_synced_ = true;
  times_.forward_begin = Now();
}

bool Reducer::State::RebuildBuckets(bool together) {
  // Not under no_sync, which the ranks need not enter together.
  if (!std::exchange(forward_synced_, false) && !together) return false;
  if (!may_rebuild_ || iterations_ == 0) return false;
  may_rebuild_ = false;
  const bool looks = !find_unused_ || is_static_;
  UseCurrentStream();
  int moved = 0;
  gradsync_error error{};
  {
    const BlockingEvent event(looks ? broadcast_title_ : "");  // of the order
    Call(gradsync_ddp_replan(ddp_.get(), &moved, &error), error);
  }
  if (moved != 0) ReadPlan();
  // Not before: what is lent cannot move.
  lending_ = !as_view_ && !gradient_type_ && !optimizer_in_backward_;
  return looks;
}

void Reducer::State::PrepareForBackward(const std::vector<at::Tensor>& outputs) {
  Begin();
  if (find_unused_ && !is_static_) FindUnused(outputs);
  if (is_static_) {
    // Of a first backward that did not end, nothing is known.
    if (recorded_) {
      firings_left_ = firings_;
    } else {
      std::fill(firings_.begin(), firings_.end(), 0U);
      WatchOutputs(outputs);
    }
  }
  armed_ = true;
  times_.backward_begin = Now();
}

void Reducer::State::FindUnused(const std::vector<at::Tensor>& outputs) {
  // By the name under which torch's reducer shows it to profilers.
  RECORD_FUNCTION("torch.distributed.ddp.reducer::search_unused_parameters",
                  c10::ArrayRef<const c10::IValue>());
  if (gradient_type_) {  // the copies have new accumulators in every iteration
    walk_.ForgetParameters();
    for (const at::Tensor& parameter : parameters_) {
      walk_.AddParameter(autograd::impl::try_get_grad_accumulator(parameter).get());
    }
  }
  const std::vector<uint32_t>& found = walk_.FindUnused(outputs);
  if (walked_ && found != unused_) same_unused_ = false;
  unused_ = found;
  if (!std::exchange(walked_, true) && unused_.empty()) {
    TORCH_WARN_ONCE(
        "find_unused_parameters=True was specified in DDP constructor, but did not find any unused "
        "parameters in the forward pass. This flag results in an extra traversal of the autograd "
        "graph every iteration,  which can adversely affect performance. If your model indeed "
        "never has any unused parameters in the forward pass, consider turning this flag off. Note "
        "that this warning may be a false positive if your model has flow control causing later "
        "iterations to have unused parameters.");
  }
  if (unused_.size() < parameters_.size()) return;
  // No parameter's hook will fire, but other ranks may wait for this one.
  WatchOutputs(outputs);
}

// Calls OnOutput when the coming backward begins.
void Reducer::State::WatchOutputs(const std::vector<at::Tensor>& outputs) {
  for (const at::Tensor& output : outputs) {
    if (!output.requires_grad() || output.is_leaf()) continue;
    output.register_hook([weak = weak_from_this()](const at::Tensor& /*gradient*/) {
      if (const auto state = weak.lock()) state->OnOutput();
    });
  }
}

void Reducer::State::OnOutput() {
  if (!armed_ || std::exchange(begun_, true)) return;
  if (!is_static_ || recorded_) {
    BeginBackward();
    return;
  }
  // From the outermost backward: parameters' hooks may fire in a nested one, which ends before.
  autograd::Engine::get_default_engine().queue_callback(
      [state = shared_from_this()] { state->FinishFirstBackward(); });
}

void Reducer::State::CheckFinalized() const {
  if (!armed_ || gradsync_ddp_unready(ddp_.get(), nullptr, 0) == parameters_.size()) return;
  Refuse(
      "Expected to have finished reduction in the prior iteration before starting a new one: some "
      "parameters have not received a gradient yet");
}

std::vector<int32_t> Reducer::State::UsedBy() const {
  std::vector<int32_t> ranks;
  for (uint32_t i = 0; i < parameters_.size(); ++i) {
    ranks.push_back(static_cast<int32_t>(gradsync_ddp_used_by(ddp_.get(), i)));
  }
  return ranks;
}

std::vector<uint64_t> Reducer::State::BucketBytes() const {
  std::vector<uint64_t> bytes;
  for (const std::vector<uint32_t>& bucket : buckets_) {
    uint64_t sum = 0;
    for (const uint32_t index : bucket) sum += views_[index].nbytes();
    bytes.push_back(sum);
  }
  return bytes;
}

void Reducer::State::OnGradient(uint32_t index, const autograd::variable_list& inputs) {
  if (tells_use_ && parameters_[index].grad().defined()) used_[index] = 1;
  if (!armed_.load(std::memory_order_acquire)) return;
  if (is_static_ && !recorded_) {
    Record(index);
    return;
  }
  if (!std::exchange(begun_, true)) BeginBackward();
  if (is_static_) {
    if (firings_left_[index] == 0) {
      Refuse(
          "Your training graph has changed in this iteration, e.g., one parameter is unused in "
          "first iteration, but then got used in the second iteration. this is not compatible with "
          "static_graph set to True. The parameter is \"" +
          names_[index] + "\", at index " + std::to_string(index) + ", on rank " +
          std::to_string(group_.rank()) + ".");
    }
    if (--firings_left_[index] != 0) return;
  }
  HandOver(index, inputs);
}

// A hook has fired in the first backward of a static graph.
void Reducer::State::Record(uint32_t index) {
  if (firings_[index]++ == 0) first_firings_.push_back(index);
}

// With the first gradient: what needs no gradient to be handed over.
void Reducer::State::BeginBackward() {
  if (lending_) TakeBack();
  if (find_unused_ && !is_static_) {
    if (skip_unused_) SkipUnusedBuckets();
    for (const uint32_t index : unused_) HandOver(index, {});
  } else if (is_static_) {
    for (uint32_t i = 0; i < parameters_.size(); ++i) {
      if (firings_[i] == 0) HandOver(i, {});
    }
  }
}

void Reducer::State::SkipUnusedBuckets() {
  std::vector<uint8_t> is_unused(parameters_.size(), 0);
  for (const uint32_t index : unused_) is_unused[index] = used_[index] == 0 ? 1 : 0;
  for (uint32_t bucket = 0; bucket < buckets_.size(); ++bucket) {
    const std::vector<uint32_t>& all = buckets_[bucket];
    if (!std::all_of(all.begin(), all.end(), [&](uint32_t i) { return is_unused[i] != 0; })) {
      continue;
    }
    gradsync_error error{};
    Call(gradsync_ddp_skip(ddp_.get(), bucket, &error), error);
    skipped_[bucket] = 1;
    for (const uint32_t index : all) stored_[index] = 1;
  }
}

// What the parameter contributes is complete.
void Reducer::State::HandOver(uint32_t index, const autograd::variable_list& inputs) {
  const bool used = IsUsedHere(index);
  UseCurrentStream();
  // The second time libgradsync says what is wrong; the slot may be under reduction by then.
  if (!std::exchange(stored_[index], uint8_t{1})) {
    if (used) {
      Store(index, inputs);
    } else {
      StoreUnused(index);
    }
  }
  int all_ready = 0;
  gradsync_error error{};
  int code = GRADSYNC_OK;
  {
    const std::lock_guard lock(mutex_);
    code = used ? gradsync_ddp_ready(ddp_.get(), index, &all_ready, &error)
                : gradsync_ddp_ready_unused(ddp_.get(), index, &all_ready, &error);
  }
  Call(code, error);
  ready_order_.push_back(index);
  if (times_.first_bucket == 0 &&
      gradsync_ddp_bucket_ready(ddp_.get(), slots_[index].bucket) != 0) {
    times_.first_bucket = Now();
  }
  if (hooked_) {
    GiveReadyBuckets();
  } else if (IsProfiled()) {
    ShowProfiler(slots_[index].bucket);
  }
  if (all_ready != 0) AllReady();
}

// After each gradient: its bucket, if it is complete and so has just been handed over.
void Reducer::State::ShowProfiler(uint32_t bucket) {
  if (skipped_[bucket] != 0 || gradsync_ddp_bucket_ready(ddp_.get(), bucket) == 0) return;
  bucket_events_.Begin(bucket, BucketTensor(bucket));
}

// Gives the hook, in index order, what has become ready.
void Reducer::State::GiveReadyBuckets() {
  while (hooked_->given() < buckets_.size()) {
    const auto bucket = static_cast<uint32_t>(hooked_->given());
    if (gradsync_ddp_bucket_ready(ddp_.get(), bucket) == 0) return;
    std::vector<at::Tensor> members;
    for (const uint32_t index : buckets_[bucket]) {
      if (!IsSparse(index)) members.push_back(parameters_[index]);
    }
    if (members.empty()) {
      hooked_->PassOver();
    } else {
      hooked_->Give(BucketTensor(bucket), members, HookedBucketCount());
    }
  }
}

void Reducer::State::AllReady() {
  times_.last_gradient = Now();
  if (manual_) {
    awaits_finish_ = true;
    return;
  }
  if (is_static_ && !recorded_) return;  // FinishFirstBackward goes on
  // Not before the last parameter: a nested backward (checkpointing) ends with the callbacks that
  // were queued during it.
  autograd::Engine::get_default_engine().queue_callback(
      [state = shared_from_this()] { state->Finish(); });
}

// All gradients are there, and the graph is known.
void Reducer::State::FinishFirstBackward() {
  for (const uint32_t index : first_firings_) HandOver(index, {});
  for (uint32_t i = 0; i < parameters_.size(); ++i) {
    if (firings_[i] == 0) HandOver(i, {});
  }
  recorded_ = true;
  tells_use_ = false;
  if (!manual_) Finish();
}

void Reducer::State::FinishBackward() {
  if (!manual_) {
    Refuse(
        "finalize_backward() called but manual backward finalization is not required. Set "
        "require_manual_backward_finalization to true first.");
  }
  if (!awaits_finish_ && armed_ &&
      gradsync_ddp_unready(ddp_.get(), nullptr, 0) < parameters_.size()) {
    Refuse(
        "finalize_backward() called before all DDP buckets were ready. Call finalize_backward() "
        "only after all DDP-managed parameters have computed gradients.");
  }
  if (!awaits_finish_) {
    Refuse(
        "finalize_backward() called but no gradient reduction requires finalization. This can "
        "happen if no_sync() is active or finalize_backward() was already called for this backward "
        "pass.");
  }
  Finish();
}

// Puts the gradient, which autograd has accumulated from `inputs`, into its slot.
void Reducer::State::Store(uint32_t index, const autograd::variable_list& inputs) {
  const at::Tensor& view = views_[index];
  at::Tensor& gradient = parameters_[index].mutable_grad();
  if (IsSparse(index)) {
    TORCH_CHECK(!gradient.defined() || gradient.layout() == at::kSparse,
                "Expected variable to have sparse gradient. The parameter is \"", names_[index],
                "\".");
    return;
  }
  TORCH_CHECK(!gradient.defined() || gradient.layout() == at::kStrided, "gradsync: parameter \"",
              names_[index],
              "\" has a sparse gradient, but not from an Embedding or EmbeddingBag that was made "
              "with sparse=True when DistributedDataParallel wrapped it");
  if (gradient.defined() && IsAlias(gradient, view)) return;
  if (IsKept(index)) {
    Refuse("the gradient of parameter \"" + names_[index] +
           "\" was replaced during backward, but is still in use; replace gradients "
           "before backward");
  }
  if (!gradient.defined()) {
    const at::NoGradGuard no_grad;
    view.zero_();
    return;
  }
  TORCH_CHECK(gradient.sizes() == view.sizes(), "gradsync: the gradient of parameter \"",
              names_[index], "\" has sizes ", gradient.sizes(), ", but the parameter had ",
              view.sizes(), " when DistributedDataParallel wrapped it");
  Copy(view, gradient);
  KeepForCurrentStream(gradient);
  if (!IsUsedHere(index)) return;
  // The old gradient dies after the new one is in place, with no lock of ours held: changing the
  // count of a tensor that Python knows may take the interpreter's lock.
  // Its memory serves autograd for the next gradients, while it is still in the caches.
  if (as_view_) {
    const at::Tensor old = std::exchange(gradient, view);
  } else if (MayLend(index, gradient, inputs)) {
    const at::Tensor old = std::exchange(gradient, Lend(index));
  }
}

// As Store, of what may turn out to be unused everywhere, and must then be as it was.
void Reducer::State::StoreUnused(uint32_t index) {
  const at::Tensor& gradient = parameters_[index].grad();
  if (!IsSparse(index) && gradient.defined() && gradient.layout() == at::kStrided &&
      IsAlias(gradient, views_[index])) {
    saved_.emplace_back(index, views_[index].clone());
  }
  Store(index, {});
}

void Reducer::State::Finish() {
  armed_ = false;
  awaits_finish_ = false;
  // Autograd runs this with the streams of whoever has called backward, which it has made to wait
  // for those of the hooks.
  UseCurrentStream();
  const bool put_back = !optimizer_in_backward_;
  const double scale = ScaleToLiving();
  gradsync_error error{};
  for (uint32_t i = 0; i < buckets_.size(); ++i) {
    Call(gradsync_ddp_wait(ddp_.get(), i, &error), error);
    bucket_events_.End(i);
    TakeBucket(i, scale);
  }
  if (may_be_unused() && put_back) {
    for (uint32_t i = 0; i < parameters_.size(); ++i) {
      if (!IsUsedHere(i)) RestoreUnused(i);
    }
    PutBackTogether();
  }
  Call(gradsync_ddp_end(ddp_.get(), &error), error);
  TakeSparse(put_back, scale);
  if (find_unused_ && !is_static_) std::fill(used_.begin(), used_.end(), uint8_t{0});
  ++iterations_;
  times_.end = Now();
  for (const std::function<void()>& call : std::exchange(calls_at_end_, {})) call();
}

// A bucket is reduced: its averages take the gradients' place.
void Reducer::State::TakeBucket(uint32_t bucket, double scale) {
  if (hooked_) {
    TakeHookedBucket(bucket);
    return;
  }
  if (scale != 1) {
    const at::NoGradGuard no_grad;
    BucketTensor(bucket).mul_(scale);
  }
  if (optimizer_in_backward_) return;
  for (const uint32_t index : buckets_[bucket]) {
    if (!IsSparse(index) && IsUsedHere(index)) Restore(index);
  }
  PutBackTogether();
}

void Reducer::State::TakeHookedBucket(uint32_t bucket) {
  const at::Tensor buffer = BucketTensor(bucket);
  const at::Tensor result = hooked_->Take(bucket, buffer, timeout_);
  // Another type, and the gradients take it instead of being rounded.
  const bool in_place = result.scalar_type() == buffer.scalar_type();
  if (in_place && result.const_data_ptr() != buffer.const_data_ptr()) Copy(buffer, result);
  if (optimizer_in_backward_) return;
  int64_t offset = 0;
  for (const uint32_t index : buckets_[bucket]) {
    if (IsSparse(index)) continue;
    const int64_t length = views_[index].numel();
    const bool used = IsUsedHere(index);
    if (in_place) {
      if (used) Restore(index);
    } else {
      const at::Tensor average = result.narrow(0, offset, length)
                                     .as_strided(views_[index].sizes(), views_[index].strides());
      // RestoreUnused() takes it from the slot, if another rank has used the parameter.
      const at::NoGradGuard no_grad;
      if (used) {
        ReplaceGradient(index, average);
      } else {
        views_[index].copy_(average);
      }
    }
    offset += length;
  }
  PutBackTogether();
}

void Reducer::State::ReplaceGradient(uint32_t index, const at::Tensor& by) {
  const at::NoGradGuard no_grad;
  at::Tensor& gradient = parameters_[index].mutable_grad();
  const at::Tensor old = std::exchange(gradient, by.to(parameters_[index].scalar_type(),
                                                       /*non_blocking=*/false, /*copy=*/true));
}

// After the dense gradients, in the group's order: that is the same on every rank.
void Reducer::State::TakeSparse(bool put_back, double scale) {
  for (size_t i = 0; i < sparse_buckets_.size(); ++i) {
    const uint32_t index = sparse_buckets_[i];
    const at::Tensor& own = parameters_[index].grad();
    const bool used_somewhere = gradsync_ddp_used_by(ddp_.get(), index) > 0;
    at::Tensor average;
    if (hooked_) {
      const at::Tensor buffer = put_back && own.defined()
                                    ? own.coalesce()
                                    : at::empty(parameters_[index].sizes(),
                                                parameters_[index].options().layout(at::kSparse));
      hooked_->Give(buffer.detach(), {parameters_[index]}, HookedBucketCount());
      average = hooked_->Take(buckets_.size() + i, buffer, timeout_);
    } else if (used_somewhere) {
      average = AverageSparse(group_, parameters_[index], put_back ? own : at::Tensor(), timeout_);
      if (scale != 1) average.mul_(scale);
    }
    if (!put_back || !used_somewhere) continue;
    const at::Tensor old = std::exchange(parameters_[index].mutable_grad(), average);
  }
}

// Puts the average from its slot in the gradient's place.
void Reducer::State::Restore(uint32_t index) {
  const at::Tensor& view = views_[index];
  at::Tensor& gradient = parameters_[index].mutable_grad();
  if (gradient.defined() && IsAlias(gradient, view)) {
    gradient.unsafeGetTensorImpl()->bump_version();
  } else if (as_view_ || MayLend(index, gradient)) {
    const at::Tensor old = std::exchange(gradient, as_view_ ? view : Lend(index));
  } else {
    PutBack(index);
  }
}

// Copies the average to the gradient: at once on the CPU, with PutBackTogether on a GPU, where it
// is launches that cost time.
void Reducer::State::PutBack(uint32_t index) {
  at::Tensor& gradient = parameters_[index].mutable_grad();
  if (device_.is_cpu()) {
    CopyOut(views_[index], gradient);
    return;
  }
  if (!gradient.defined()) gradient = NewLike(views_[index]);
  gradients_to_fill_.push_back(gradient);
  averages_.push_back(views_[index]);
}

void Reducer::State::PutBackTogether() {
  if (gradients_to_fill_.empty()) return;
  const at::NoGradGuard no_grad;
  at::_foreach_copy_(gradients_to_fill_, averages_, /*non_blocking=*/true);
  gradients_to_fill_.clear();
  averages_.clear();
}

// This rank has not used the parameter, but others may have.
void Reducer::State::RestoreUnused(uint32_t index) {
  if (IsSparse(index)) return;
  if (gradsync_ddp_used_by(ddp_.get(), index) > 0) {
    if (gradient_type_) {
      ReplaceGradient(index, views_[index]);  // by then the parameter has its full type again
    } else {
      Restore(index);
    }
    return;
  }
  for (const auto& [saved, content] : saved_) {
    if (saved != index) continue;
    Copy(views_[index], content);
    KeepForCurrentStream(content);
  }
}

// By what the averages over all ranks become those over the ranks that still have input.
double Reducer::State::ScaleToLiving() {
  if (!living_) return 1;
  const c10::intrusive_ptr<c10d::Work> living = std::exchange(living_, {});
  const c10::intrusive_ptr<c10::ivalue::Future> sum = living->getFuture();
  WaitFor(*sum, "the count of the ranks that have input", timeout_);
  return group_.size() / sum->value().toTensorVector().at(0).item<double>();
}

at::Tensor Reducer::State::BucketTensor(uint32_t bucket) const {
  gradsync_error error{};
  gradsync_bucket found{};
  Check(gradsync_ddp_bucket(ddp_.get(), bucket, &found, &error), error);
  gradsync_buffer* const buffer = slots_[buckets_[bucket].front()].buffer;
  gradsync_buffer_retain(buffer);
  int64_t count = 0;  // without padding
  for (const uint32_t index : buckets_[bucket]) count += views_[index].numel();
  return TensorOver(found.data, {count}, std::nullopt,
                    at::TensorOptions(device_).dtype(TypeOf(buckets_[bucket].front())),
                    [buffer](void*) { gradsync_buffer_release(buffer); });
}

void Reducer::State::StandAside(gradsync_aside_policy policy) {
  armed_ = false;
  forward_synced_ = false;
  gradsync_error error{};
  Call(gradsync_ddp_stand_aside(ddp_.get(), policy, &error), error);
}

uint32_t Reducer::State::Rejoin() {
  gradsync_error error{};
  uint32_t last = 0;
  Call(gradsync_rejoin(group_.handle(), &last, &error), error);
  return last;
}

void Reducer::State::RunEmptyIteration() {
  Begin();
  LeaveSlots();
  UseCurrentStream();
  gradsync_error error{};
  for (uint32_t i = 0; i < parameters_.size(); ++i) {
    views_[i].zero_();
    int all_ready = 0;
    Call(may_be_unused() ? gradsync_ddp_ready_unused(ddp_.get(), i, &all_ready, &error)
                         : gradsync_ddp_ready(ddp_.get(), i, &all_ready, &error),
         error);
  }
  if (hooked_) GiveReadyBuckets();
  // Nothing is put back.
  const bool optimizer = std::exchange(optimizer_in_backward_, true);
  Finish();
  optimizer_in_backward_ = optimizer;
}

// Where gradients lie in slots, they stay there, and the slots go elsewhere.
void Reducer::State::LeaveSlots() {
  bool any = false;
  for (uint32_t i = 0; i < parameters_.size(); ++i) {
    const at::Tensor& gradient = parameters_[i].grad();
    any = any || IsKept(i) || (!IsSparse(i) && gradient.defined() && IsAlias(gradient, views_[i]));
  }
  if (!any) return;
  gradsync_error error{};
  Call(gradsync_ddp_renew(ddp_.get(), &error), error);
  ReadSlots();
  for (Loan& loan : loans_) loan.storage.reset();
}

// Whether nobody would notice if another tensor took the place of `gradient`. Autograd itself, in a
// hook, still has the `inputs` that it was made of.
bool Reducer::State::MayLend(uint32_t index, const at::Tensor& gradient,
                             const autograd::variable_list& inputs) const {
  if (!lending_ || !loans_[index].allowed || !gradient.defined() ||
      gradient.nbytes() < kMinLoanBytes || gradient.use_count() != 1 || gradient.requires_grad()) {
    return false;
  }
  // Without an allocator the memory is somebody else's: an array's, say.
  if (gradient.storage().allocator() == nullptr) return false;
  size_t known = 1;
  for (const at::Tensor& input : inputs) {
    if (!input.defined() || !input.is_alias_of(gradient)) continue;
    // A view (a transposed product, say) keeps what it is a view of.
    const bool alone =
        input.use_count() == 1 && (!input.is_view() || input._base().use_count() == 1);
    if (!alone) return false;
    known += input.is_view() ? 2 : 1;
  }
  return gradient.storage().use_count() == known;
}

at::Tensor Reducer::State::Lend(uint32_t index) {
  at::Tensor lent = ViewOf(slots_[index], parameters_[index], TypeOf(index));
  loans_[index].storage = lent.storage().getWeakStorageImpl();
  return lent;
}

// Whether somebody still uses the slot, and not as the parameter's gradient.
bool Reducer::State::IsKept(uint32_t index) const {
  const auto& storage = loans_[index].storage;
  if (!storage || storage->expired()) return false;
  const at::Tensor& gradient = parameters_[index].grad();
  return !gradient.defined() || !IsAlias(gradient, views_[index]);
}

// Before the first gradient of an iteration is stored: makes the slots ours again.
void Reducer::State::TakeBack() {
  bool any_kept = false;
  for (uint32_t i = 0; i < parameters_.size(); ++i) {
    if (!IsKept(i)) continue;
    any_kept = true;
    loans_[i].allowed = false;
  }
  if (!any_kept) return;
  lending_ = ++renewals_ < kMaxRenewals;
  gradsync_error error{};
  Call(gradsync_ddp_renew(ddp_.get(), &error), error);
  ReadPlan();
  for (Loan& loan : loans_) loan.storage.reset();
}

Reducer::Reducer(std::shared_ptr<Session> session, const std::string& tag,
                 const std::vector<uint32_t>& ranks, const std::vector<at::Tensor>& parameters,
                 const std::vector<std::string>& names, const Options& options)
    : state_(std::make_shared<State>(std::move(session), tag, ranks, parameters, names, options)) {
  state_->AddHooks();
}

Reducer::~Reducer() { state_->RemoveHooks(); }

void Reducer::SetStaticGraph() { state_->SetStaticGraph(); }
void Reducer::SetHook(std::unique_ptr<c10d::CommHookInterface> hook) {
  state_->SetHook(std::move(hook));
}
void Reducer::SetOptimizerInBackward() { state_->SetOptimizerInBackward(); }
void Reducer::SetManualFinish(bool manual) { state_->SetManualFinish(manual); }
void Reducer::PrepareForForward() { state_->PrepareForForward(); }
bool Reducer::RebuildBuckets(bool together) { return state_->RebuildBuckets(together); }
void Reducer::PrepareForBackward(const std::vector<at::Tensor>& outputs) {
  state_->PrepareForBackward(outputs);
}
void Reducer::OnGradient(uint32_t index) { state_->OnGradient(index, {}); }
void Reducer::FinishBackward() { state_->FinishBackward(); }
void Reducer::StandAside(gradsync_aside_policy policy) { state_->StandAside(policy); }
uint32_t Reducer::Rejoin() { return state_->Rejoin(); }
void Reducer::RunEmptyIteration() { state_->RunEmptyIteration(); }
void Reducer::AverageOverLiving(c10::intrusive_ptr<c10d::Work> living) {
  state_->AverageOverLiving(std::move(living));
}
void Reducer::CallAtEnd(std::function<void()> call) { state_->CallAtEnd(std::move(call)); }
void Reducer::CheckFinalized() const { state_->CheckFinalized(); }
void Reducer::RemoveHooks() { state_->RemoveHooks(); }
bool Reducer::recorded_static_graph() const { return state_->recorded_static_graph(); }
bool Reducer::needs_manual_finish() const { return state_->needs_manual_finish(); }
bool Reducer::found_same_unused() const { return state_->found_same_unused(); }
std::vector<int32_t> Reducer::UsedBy() const { return state_->UsedBy(); }
std::vector<uint64_t> Reducer::BucketBytes() const { return state_->BucketBytes(); }
std::vector<std::vector<uint32_t>> Reducer::BucketParameters() const { return state_->buckets(); }
std::vector<uint32_t> Reducer::ReadyOrder() const { return state_->ready_order(); }
uint32_t Reducer::ReducedBuckets() const { return state_->reduced_buckets(); }
Reducer::Times Reducer::times() const { return state_->times(); }
uint64_t Reducer::iterations() const { return state_->iterations(); }
std::string Reducer::error() const { return state_->error(); }

}  // namespace gradsync::torch
