// RANKOPT_TARGET_BEGIN("avx2,fma") ... RANKOPT_TARGET_END: compile what lies between for that
// instruction set. Include every standard header before it, so that none of their inline functions
// is compiled for a CPU the process may not have.
#pragma once

#define RANKOPT_PRAGMA(text) _Pragma(#text)
#if defined(__clang__)
#define RANKOPT_TARGET_BEGIN(isa) \
  RANKOPT_PRAGMA(clang attribute push(__attribute__((target(isa))), apply_to = function))
#define RANKOPT_TARGET_END RANKOPT_PRAGMA(clang attribute pop)
#else
#define RANKOPT_TARGET_BEGIN(isa) RANKOPT_PRAGMA(GCC push_options) RANKOPT_PRAGMA(GCC target(isa))
#define RANKOPT_TARGET_END RANKOPT_PRAGMA(GCC pop_options)
#endif
