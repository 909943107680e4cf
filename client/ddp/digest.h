// A 128-bit fingerprint of a sequence of numbers, for comparing lists across ranks without sending
// them. The same on every machine and in every build; no defence against malice.
#ifndef GRADSYNC_CLIENT_DDP_DIGEST_H_
#define GRADSYNC_CLIENT_DDP_DIGEST_H_

#include <bit>
#include <cstdint>

namespace gradsync {

struct Digest {
  uint64_t high = 0;
  uint64_t low = 0;

  bool operator==(const Digest&) const = default;
};

class DigestBuilder {
 public:
  // Two lanes with different odd multipliers: a step of each is a bijection of its state, so that
  // sequences which differ in one number never collide in either.
  void Add(uint64_t number) {
    high_ = std::rotl(high_ ^ number, 29) * 0xd6e8feb86659fd93;
    low_ = std::rotl(low_ + number, 37) * 0xa0761d6478bd642f;
    ++length_;
  }

  // A last mixing, so that the final numbers reach every bit.
  Digest Finish() const {
    DigestBuilder end = *this;
    for (const uint64_t number : {length_, high_, low_}) end.Add(number);
    return {end.high_ ^ (end.low_ >> 32), end.low_ ^ (end.high_ >> 32)};
  }

 private:
  uint64_t high_ = 0x243f6a8885a308d3;
  uint64_t low_ = 0x13198a2e03707344;
  uint64_t length_ = 0;
};

}  // namespace gradsync

#endif  // GRADSYNC_CLIENT_DDP_DIGEST_H_
