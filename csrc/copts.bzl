"""Compiler options of everything under //csrc."""

# Not -ffast-math and not -march: NaN and infinity have meanings here, and the instruction set is chosen at run time
# (common/multiarch.h). The two -fno options only drop errno and trap flags that nobody reads, without which no compiler
# makes vector code of a comparison.
COPTS = [
    "-O3",
    "-fno-math-errno",
    "-fno-trapping-math",
    "-ffp-contract=fast",
    "-fvisibility=hidden",
    "-Wall",
    "-Wextra",
]
