// The link between any hosts: one TCP connection per reader, opened by the reader. A thread of the
// sender writes slots to all connections while the next one is packed. Both ends notice a peer that
// is gone (reset, keep-alive) or silent (no progress for a while) and tell the others why they give
// up.
#pragma once

#include <memory>
#include <string>

#include "csrc/refit/link.h"

namespace tandem {

struct TcpOptions {
  double silence_s = 20;  // no byte and no heartbeat of a peer for so long: it is lost
};

// host: the address to listen on and to be reached at, IPv4, IPv6 or a name; port 0 takes a free
// one. The address is "host:port", IPv6 in brackets.
Status CreateTcpSendLink(const std::string& host, int port, const LinkGeometry& geometry,
                         const TcpOptions& options, std::unique_ptr<SendLink>* link);
Status ConnectTcpReceiveLink(const std::string& address, const LinkGeometry& geometry,
                             int32_t reader, const TcpOptions& options,
                             std::unique_ptr<ReceiveLink>* link);

}  // namespace tandem
