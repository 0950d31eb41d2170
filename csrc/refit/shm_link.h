// The link between processes of one host: a segment of shared memory with a ring of slots. Packing
// into a slot is sending; waiting is on futexes in the segment. The sender owns the segment's name
// and removes it as soon as all readers are there, so that nothing is left behind whoever is
// killed. Each end holds a lock that the kernel releases when the process dies, however it dies,
// which is how the others notice within a fraction of a second.
#pragma once

#include <memory>
#include <string>

#include "csrc/refit/link.h"

namespace tandem {

// name: of the segment, without a slash; it begins with the run's tag, so that a reaper finds it. A
// segment of that name that nobody alive holds is replaced; one that somebody holds is
// kUnavailable.
Status CreateShmSendLink(const std::string& name, const LinkGeometry& geometry,
                         std::unique_ptr<SendLink>* link);
Status AttachShmReceiveLink(const std::string& address, const LinkGeometry& geometry,
                            int32_t reader, std::unique_ptr<ReceiveLink>* link);

}  // namespace tandem
