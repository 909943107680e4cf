// Where operators find a daemon.
#ifndef GRADSYNC_SERVER_INSPECT_SOCKET_PATH_H_
#define GRADSYNC_SERVER_INSPECT_SOCKET_PATH_H_

#include <string>

namespace gradsync {

// The inspection socket of the daemon whose trainers connect to `trainer_socket`, unless it was
// told another.
inline std::string DefaultInspectSocket(const std::string& trainer_socket) {
  return trainer_socket + ".inspect";
}

}  // namespace gradsync

#endif  // GRADSYNC_SERVER_INSPECT_SOCKET_PATH_H_
