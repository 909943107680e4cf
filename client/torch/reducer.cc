#include "client/torch/reducer.h"

#include <ATen/core/grad_mode.h>
#include <torch/csrc/autograd/engine.h>
#include <torch/csrc/autograd/function.h>
#include <torch/csrc/autograd/utils/lambda_post_hook.h>
#include <torch/csrc/autograd/variable.h>

#include <algorithm>
#include <atomic>
#include <mutex>
#include <optional>
#include <utility>

#include "client/torch/errors.h"
#include "client/torch/tensors.h"

namespace gradsync::torch {
namespace {

namespace autograd = ::torch::autograd;
using Accumulator = decltype(autograd::impl::grad_accumulator(std::declval<at::Tensor>()));

// Row-major, unless the parameter's own order of dimensions is dense (channels last, say): then
// that, so that a gradient and its slot have the same layout.
at::DimVector SlotStrides(const at::Tensor& parameter) {
  if (parameter.is_non_overlapping_and_dense()) return at::DimVector(parameter.strides());
  at::DimVector strides(static_cast<size_t>(parameter.dim()));
  int64_t stride = 1;
  for (size_t i = strides.size(); i-- > 0;) {
    strides[i] = stride;
    stride *= std::max<int64_t>(parameter.size(static_cast<int64_t>(i)), 1);
  }
  return strides;
}

// For smaller gradients a copy costs less than a new tensor.
constexpr size_t kMinLoanBytes = 16 * 1024;
// Each may leave all memory of the ddp behind with a single gradient that somebody keeps.
constexpr int kMaxRenewals = 2;

// A slot as a tensor, which keeps its memory mapped.
at::Tensor ViewOf(const gradsync_slot& slot, const at::Tensor& parameter) {
  gradsync_buffer_retain(slot.buffer);
  return at::from_blob(
      slot.data, parameter.sizes(), SlotStrides(parameter),
      [buffer = slot.buffer](void*) { gradsync_buffer_release(buffer); },
      at::TensorOptions().dtype(parameter.scalar_type()).device(at::kCPU));
}

bool SameLayout(const at::Tensor& a, const at::Tensor& b) {
  return a.scalar_type() == b.scalar_type() && a.sizes() == b.sizes() &&
         (a.strides() == b.strides() || (a.is_contiguous() && b.is_contiguous())) && !a.is_neg() &&
         !a.is_conj();
}

bool IsAlias(const at::Tensor& gradient, const at::Tensor& view) {
  return gradient.is_same(view) ||
         (gradient.const_data_ptr() == view.const_data_ptr() && SameLayout(gradient, view));
}

void Copy(const at::Tensor& target, const at::Tensor& source) {
  if (SameLayout(target, source)) {
    CopyBytes(target.data_ptr(), source.const_data_ptr(), target.nbytes());
  } else {
    const at::NoGradGuard no_grad;
    target.copy_(source);
  }
}

// `gradient` becomes equal to `view`, but stays the tensor that it is, if it is one.
void CopyOut(const at::Tensor& view, at::Tensor& gradient) {
  if (!gradient.defined())
    gradient = at::empty_strided(view.sizes(), view.strides(), view.options());
  Copy(gradient, view);
  // A copy by memcpy is a change like any other.
  gradient.unsafeGetTensorImpl()->bump_version();
}

gradsync_parameter Describe(const at::Tensor& parameter, const std::string& name) {
  gradsync_parameter description{};
  description.name = name.c_str();
  const auto dtype = DTypeOf(parameter.scalar_type());
  TORCH_CHECK_TYPE(dtype.has_value(), "gradsync: the gradient of parameter \"", name,
                   "\" cannot be averaged: its type is ", parameter.scalar_type());
  description.dtype = *dtype;
  description.ndim = static_cast<uint32_t>(std::min<int64_t>(parameter.dim(), GRADSYNC_MAX_DIMS));
  for (int64_t i = 0; i < parameter.dim(); ++i) {
    const size_t at = static_cast<size_t>(std::min<int64_t>(i, GRADSYNC_MAX_DIMS - 1));
    const int64_t before = i < GRADSYNC_MAX_DIMS ? 1 : description.shape[at];
    description.shape[at] = before * parameter.size(i);
  }
  return description;
}

}  // namespace

class Reducer::State : public std::enable_shared_from_this<State> {
 public:
  State(std::shared_ptr<Session> session, const std::string& tag,
        const std::vector<uint32_t>& ranks, const std::vector<at::Tensor>& parameters,
        std::vector<std::string> names, const Options& options)
      : parameters_(parameters),
        names_(std::move(names)),
        as_view_(options.gradient_as_bucket_view),
        stored_(parameters.size()),
        loans_(parameters.size()),
        group_(std::move(session), tag, ranks, options.timeout) {
    Create(options);
    ReadPlan();
  }

  void AddHooks();
  void RemoveHooks();
  void PrepareForForward();
  bool RebuildBuckets();
  void PrepareForBackward();
  void CheckFinalized() const;
  std::vector<uint64_t> BucketBytes() const;
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
  void ReadPlan();
  void Call(int code, const gradsync_error& error);
  void CheckHooks() const;
  void Begin();

  // On autograd's threads.
  void OnGradient(uint32_t index, const autograd::variable_list& inputs);
  void Store(uint32_t index, const autograd::variable_list& inputs);
  void Finalize();
  void Restore(uint32_t index);

  // Lending, see below.
  bool MayLend(uint32_t index, const at::Tensor& gradient,
               const autograd::variable_list& inputs = {}) const;
  at::Tensor Lend(uint32_t index);
  bool IsKept(uint32_t index) const;
  void TakeBack();

  const std::vector<at::Tensor> parameters_;
  const std::vector<std::string> names_;
  const bool as_view_;
  std::vector<gradsync_slot> slots_;            // by parameter
  std::vector<at::Tensor> views_;               // by parameter: its slot
  std::vector<std::vector<uint32_t>> buckets_;  // by bucket: its parameters
  std::vector<Hook> hooks_;
  std::vector<uint8_t> stored_;  // by parameter: its slot is handed over, or will be
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
  bool taken_back_ = false;  // in this iteration
  int renewals_ = 0;
  std::atomic<bool> armed_{false};
  bool forward_synced_ = false;
  bool may_rebuild_ = true;
  std::atomic<uint64_t> iterations_{0};
  // Makes the hooks' calls of gradsync_ddp_ready not overlap. Nothing of torch's or Python's is
  // called under it.
  mutable std::mutex mutex_;
  std::string error_;  // under mutex_

  struct Destroy {
    void operator()(gradsync_ddp* ddp) const { gradsync_ddp_destroy(ddp); }
  };
  Group group_;
  std::unique_ptr<gradsync_ddp, Destroy> ddp_;
};

void Reducer::State::Create(const Options& options) {
  std::vector<gradsync_parameter> descriptions;
  descriptions.reserve(parameters_.size());
  for (size_t i = 0; i < parameters_.size(); ++i) {
    CheckDenseCpu(parameters_[i], "DistributedDataParallel");
    descriptions.push_back(Describe(parameters_[i], names_[i]));
  }
  gradsync_ddp_options raw{};
  raw.struct_size = sizeof(raw);
  raw.bucket_bytes = options.bucket_bytes;
  raw.first_bucket_bytes = options.first_bucket_bytes;
  raw.timeout_ms = Milliseconds(options.timeout);
  gradsync_error error{};
  gradsync_ddp* ddp = nullptr;
  Check(gradsync_ddp_create(group_.handle(), descriptions.data(),
                            static_cast<uint32_t>(descriptions.size()), &raw, &ddp, &error),
        error);
  ddp_.reset(ddp);
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

// Makes the views of the slots where they are now. Gradients that lie in their old slots move
// along: libgradsync has copied the contents.
void Reducer::State::ReadPlan() {
  gradsync_error error{};
  const std::vector<at::Tensor> old_views = std::exchange(views_, {});
  views_.reserve(parameters_.size());
  slots_.resize(parameters_.size());
  for (uint32_t i = 0; i < parameters_.size(); ++i) {
    slots_[i] = {};
    Call(gradsync_ddp_slot(ddp_.get(), i, &slots_[i], &error), error);
    views_.push_back(ViewOf(slots_[i], parameters_[i]));
    if (old_views.empty()) continue;
    at::Tensor& gradient = parameters_[i].mutable_grad();
    if (as_view_ && gradient.defined() && IsAlias(gradient, old_views[i])) gradient = views_[i];
  }
  buckets_.clear();
  for (uint32_t i = 0; i < gradsync_ddp_bucket_count(ddp_.get()); ++i) {
    gradsync_bucket bucket{};
    Call(gradsync_ddp_bucket(ddp_.get(), i, &bucket, &error), error);
    buckets_.emplace_back(bucket.parameters, bucket.parameters + bucket.parameter_count);
  }
}

void Reducer::State::AddHooks() {
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

void Reducer::State::Begin() {
  armed_ = false;
  gradsync_error error{};
  Call(gradsync_ddp_begin(ddp_.get(), &error), error);
  std::fill(stored_.begin(), stored_.end(), uint8_t{0});
  taken_back_ = false;
}

void Reducer::State::PrepareForForward() {
  CheckHooks();
  Begin();  // already here, so that what the last backward left out is reported before the forward
  forward_synced_ = true;
}

bool Reducer::State::RebuildBuckets() {
  // Not under no_sync, which the ranks need not enter together.
  if (!std::exchange(forward_synced_, false) || !may_rebuild_ || iterations_ == 0) return false;
  may_rebuild_ = false;
  int moved = 0;
  gradsync_error error{};
  Call(gradsync_ddp_replan(ddp_.get(), &moved, &error), error);
  if (moved != 0) ReadPlan();
  // Not before: what is lent cannot move.
  lending_ = !as_view_;
  return true;
}

void Reducer::State::PrepareForBackward() {
  Begin();
  armed_ = true;
}

void Reducer::State::CheckFinalized() const {
  if (!armed_ || gradsync_ddp_unready(ddp_.get(), nullptr, 0) == parameters_.size()) return;
  throw Error(GRADSYNC_FAILED_PRECONDITION,
              "Expected to have finished reduction in the prior iteration before starting a new "
              "one: some parameters have not received a gradient yet");
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
  if (!armed_.load(std::memory_order_acquire)) return;
  if (lending_ && !std::exchange(taken_back_, true)) TakeBack();
  // The second time libgradsync says what is wrong; the slot may be under reduction by then.
  if (!std::exchange(stored_[index], uint8_t{1})) Store(index, inputs);
  int all_ready = 0;
  gradsync_error error{};
  int code = GRADSYNC_OK;
  {
    const std::lock_guard lock(mutex_);
    code = gradsync_ddp_ready(ddp_.get(), index, &all_ready, &error);
  }
  Call(code, error);
  // Not before the last parameter: a nested backward (checkpointing) ends with the callbacks that
  // were queued during it.
  if (all_ready != 0) {
    autograd::Engine::get_default_engine().queue_callback(
        [state = shared_from_this()] { state->Finalize(); });
  }
}

// Puts the gradient, which autograd has accumulated from `inputs`, into its slot.
void Reducer::State::Store(uint32_t index, const autograd::variable_list& inputs) {
  const at::Tensor& view = views_[index];
  at::Tensor& gradient = parameters_[index].mutable_grad();
  if (gradient.defined() && IsAlias(gradient, view)) return;
  if (IsKept(index)) {
    throw Error(
        GRADSYNC_FAILED_PRECONDITION,
        "the gradient of parameter \"" + names_[index] +
            "\" was replaced during backward, but is still in use; replace gradients before "
            "backward");
  }
  if (!gradient.defined()) {
    const at::NoGradGuard no_grad;
    view.zero_();
    return;
  }
  if (gradient.layout() != at::kStrided) {
    C10_THROW_ERROR(
        NotImplementedError,
        "gradsync: parameter \"" + names_[index] +
            "\" has a sparse gradient, which is not implemented yet; construct its module "
            "with sparse=False");
  }
  TORCH_CHECK(gradient.sizes() == view.sizes(), "gradsync: the gradient of parameter \"",
              names_[index], "\" has sizes ", gradient.sizes(), ", but the parameter had ",
              view.sizes(), " when DistributedDataParallel wrapped it");
  Copy(view, gradient);
  // The old gradient dies after the new one is in place, with no lock of ours held: changing the
  // count of a tensor that Python knows may take the interpreter's lock.
  // Its memory serves autograd for the next gradients, while it is still in the caches.
  if (as_view_) {
    const at::Tensor old = std::exchange(gradient, view);
  } else if (MayLend(index, gradient, inputs)) {
    const at::Tensor old = std::exchange(gradient, Lend(index));
  }
}

void Reducer::State::Finalize() {
  armed_ = false;
  gradsync_error error{};
  for (uint32_t i = 0; i < buckets_.size(); ++i) {
    Call(gradsync_ddp_wait(ddp_.get(), i, &error), error);
    for (const uint32_t index : buckets_[i]) Restore(index);
  }
  Call(gradsync_ddp_end(ddp_.get(), &error), error);
  ++iterations_;
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
    CopyOut(view, gradient);
  }
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
  at::Tensor lent = ViewOf(slots_[index], parameters_[index]);
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

void Reducer::PrepareForForward() { state_->PrepareForForward(); }
bool Reducer::RebuildBuckets() { return state_->RebuildBuckets(); }
void Reducer::PrepareForBackward() { state_->PrepareForBackward(); }
void Reducer::CheckFinalized() const { state_->CheckFinalized(); }
void Reducer::RemoveHooks() { state_->RemoveHooks(); }
std::vector<uint64_t> Reducer::BucketBytes() const { return state_->BucketBytes(); }
uint64_t Reducer::iterations() const { return state_->iterations(); }
std::string Reducer::error() const { return state_->error(); }

}  // namespace gradsync::torch
