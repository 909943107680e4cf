#include "client/ddp/sentences.h"

namespace gradsync {
namespace {

// A failed group's text holds just under 1000 bytes, of which PyTorch's words take more than half.
constexpr size_t kNamesLimit = kGroupNamesLimit;
constexpr size_t kIndicesLimit = 60;
constexpr size_t kNameLimit = 120;

constexpr char kUnfinished[] =
    "Expected to have finished reduction in the prior iteration before starting a new one. ";
constexpr char kUnused[] =
    "This error indicates that your module has parameters that were not used in producing loss. ";
constexpr char kMayFind[] =
    "You can enable unused parameter detection by passing the keyword argument "
    "`find_unused_parameters=True` to `torch.nn.parallel.DistributedDataParallel`, and by ";
constexpr char kDoesFind[] =
    "Since `find_unused_parameters=True` is enabled, this likely  means that not all `forward` "
    "outputs participate in computing loss. You can fix this by ";
constexpr char kOutputs[] =
    "making sure all `forward` function outputs participate in calculating loss.";
constexpr char kChanged[] =
    "This error indicates that your training graph has changed in this iteration, e.g., one "
    "parameter is used in first iteration, but then got unused in the second iteration. this is "
    "not compatible with static_graph set to True.";
constexpr char kDebug[] =
    "\nIn addition, you can set the environment variable TORCH_DISTRIBUTED_DEBUG to either INFO or "
    "DETAIL to have torch print more about this rank.";

template <typename Describe>
std::string List(std::span<const uint32_t> indices, const char* separator, size_t limit,
                 const Describe& describe) {
  std::string text;
  for (size_t i = 0; i < indices.size(); ++i) {
    const std::string item = describe(indices[i]);
    if (i > 0 && text.size() + item.size() > limit) {
      return text + " and " + std::to_string(indices.size() - i) + " more";
    }
    if (i > 0) text += separator;
    text += item;
  }
  return text;
}

std::string Advice(UnusedPolicy policy) {
  switch (policy) {
    case UnusedPolicy::kError:
      return std::string(kUnused) + kMayFind + kOutputs;
    case UnusedPolicy::kFind:
      return std::string(kUnused) + kDoesFind + kOutputs;
    case UnusedPolicy::kStatic:
      break;
  }
  return kChanged;
}

}  // namespace

std::string ListNames(std::span<const ParameterSpec> parameters, std::span<const uint32_t> indices,
                      size_t limit) {
  return List(indices, ", ", limit,
              [&](uint32_t index) { return ShortName(parameters[index].name, kNameLimit); });
}

std::string UnfinishedSentence(std::span<const ParameterSpec> parameters,
                               std::span<const uint32_t> unready, uint32_t rank,
                               UnusedPolicy policy, size_t names_limit) {
  const std::string who = " for rank " + std::to_string(rank);
  if (unready.empty()) {
    return kUnfinished + ("Every gradient was handed over" + who) +
           ", but backward ended before the averages were collected: look for the exception that "
           "ended it.";
  }
  const std::string indices =
      List(unready, " ", kIndicesLimit, [](uint32_t index) { return std::to_string(index); });
  return kUnfinished + Advice(policy) + "\nParameter indices which did not receive grad" + who +
         ": " + indices + "\nParameters which did not receive grad" + who + ": " +
         ListNames(parameters, unready, names_limit) + kDebug;
}

std::string ReadyTwiceSentence(const ParameterSpec& parameter, uint32_t index) {
  return "Expected to mark a variable ready only once. Parameter at index " +
         std::to_string(index) + " with name " + ShortName(parameter.name, kNameLimit) +
         " has been marked as ready twice in one iteration: two backward passes reached it after "
         "one forward. Do all but the last under no_sync, and do not use one parameter in several "
         "reentrant (checkpointed) backward passes.";
}

std::string BucketNotReadySentence(std::span<const ParameterSpec> parameters, uint32_t bucket,
                                   std::span<const uint32_t> unready) {
  return "bucket " + std::to_string(bucket) +
         " has not been handed over; it lacks the gradients of " +
         ListNames(parameters, unready, kNamesLimit);
}

}  // namespace gradsync
