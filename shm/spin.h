// What a thread does between two looks at a word that it spins on.
#ifndef GRADSYNC_SHM_SPIN_H_
#define GRADSYNC_SHM_SPIN_H_

namespace gradsync {

// Tells the processor that this is a spin loop, so that it saves power and lets a sibling
// hardware thread run. Nothing on processors without such a hint.
inline void SpinPause() {
#if defined(__x86_64__) || defined(__i386__)
  __builtin_ia32_pause();
#elif defined(__aarch64__)
  asm volatile("yield");
#endif
}

}  // namespace gradsync

#endif  // GRADSYNC_SHM_SPIN_H_
