#include "server/engine/cuda/flags.h"

#include <cerrno>
#include <cstdlib>
#include <new>
#include <utility>

namespace gradsync::cuda {

Result<std::shared_ptr<DeviceFlags>> PinnedFlags::Create(std::shared_ptr<const Mapping> mapping,
                                                         size_t devices) {
  const auto address = reinterpret_cast<uintptr_t>(mapping->data());
  if (!mapping->Contains(0, kFlagPageBytes) || address % kFlagPageBytes != 0) {
    return Unexpected(Code::kInvalidArgument, "a flag page needs a whole page of memory");
  }
  return std::shared_ptr<DeviceFlags>(new PinnedFlags(std::move(mapping), devices));
}

FlagPage* PinnedFlags::page() const {
  return static_cast<FlagPage*>(static_cast<void*>(mapping_->data()));
}

Result<CUdeviceptr> PinnedFlags::AddressOn(const Device& device,
                                           const std::shared_ptr<const PrimaryContext>& context) {
  const MutexLock lock(&mutex_);
  CUdeviceptr& address = addresses_[device.index()];
  if (address != 0) return address;
  if (!pinned_.valid()) {
    Result<PinnedMemory> pinned = PinnedMemory::Pin(context, mapping_->data(), kFlagPageBytes);
    if (!pinned) return Unexpected(std::move(pinned.error()));
    pinned_ = std::move(*pinned);
  }
  const Result<CUdeviceptr> found = pinned_.AddressIn(*context);
  if (found) address = *found;
  return found;
}

Result<std::unique_ptr<CompletionWord>> CompletionWord::Create(
    std::shared_ptr<const PrimaryContext> context) {
  std::unique_ptr<CompletionWord> word(new CompletionWord());
  void* const page = std::aligned_alloc(kFlagPageBytes, kFlagPageBytes);
  if (page == nullptr) return Unexpected(ErrnoStatus(Code::kOutOfMemory, ENOMEM, "a page"));
  word->word_ = new (page) std::atomic<uint64_t>(0);
  const PrimaryContext& used = *context;
  Result<PinnedMemory> pinned = PinnedMemory::Pin(std::move(context), page, kFlagPageBytes);
  if (!pinned) return Unexpected(std::move(pinned.error()));
  word->pinned_ = std::move(*pinned);
  const Result<CUdeviceptr> address = word->pinned_.AddressIn(used);
  if (!address) return Unexpected(address.error());
  word->address_ = *address;
  return word;
}

CompletionWord::~CompletionWord() {
  pinned_ = PinnedMemory();
  std::free(word_);
}

}  // namespace gradsync::cuda
