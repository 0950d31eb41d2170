// A device stream as the public headers know it, without a device runtime's headers: a cudaStream_t
// on CUDA.
#pragma once

namespace tandem {

using Stream = void*;

}  // namespace tandem
