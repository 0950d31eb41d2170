// The sender's door: takes connections, reads who they are, and hands readers to the link. Whoever
// does not say hello as a reader does is dropped with a line on stderr, and disturbs nobody;
// whoever cannot be let in is told why.
#pragma once

#include <poll.h>

#include <cstdint>
#include <functional>
#include <memory>
#include <string>
#include <vector>

#include "csrc/refit/tcp_frame.h"
#include "csrc/refit/tcp_socket.h"

namespace tandem::tcp {

class Door {
 public:
  // Judges a hello: code kOk lets the reader in, and Admit gets the connection.
  using Judge = std::function<Fault(const Hello& hello, const std::string& peer)>;
  using Admit = std::function<void(const Hello& hello, UniqueFd fd, const std::string& peer)>;

  Door(UniqueFd listener, double hello_s, Judge judge, Admit admit);
  ~Door();

  // Whether something is to be done that no descriptor announces: a deadline, or another try.
  bool wants_turns() const { return !guests_.empty() || is_paused_; }
  void AddTo(std::vector<pollfd>* polled) const;
  // polled: what AddTo added, after the poll.
  void Serve(const pollfd* polled);
  // Whoever comes from now on finds nobody listening.
  void Close();

 private:
  struct Guest;
  static constexpr size_t kMaxGuests = 64;
  static constexpr int kMaxLogLines = 10;

  void AcceptAll();
  bool Attend(Guest* guest);  // false: the guest goes
  void Drop(const Guest& guest, const char* why);

  UniqueFd listener_;
  double hello_s_;
  Judge judge_;
  Admit admit_;
  std::vector<std::unique_ptr<Guest>> guests_;
  bool is_paused_ = false;  // no descriptor was left; the next turn tries again
  int num_dropped_ = 0;
};

}  // namespace tandem::tcp
