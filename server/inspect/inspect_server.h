// The daemon's gRPC server for operators: Inspect, the standard health service, and reflection, on
// a local socket.
#ifndef GRADSYNC_SERVER_INSPECT_INSPECT_SERVER_H_
#define GRADSYNC_SERVER_INSPECT_INSPECT_SERVER_H_

#include <memory>
#include <string>

#include "server/inspect/acceptor.h"
#include "server/inspect/inspect_service.h"
#include "shm/status.h"

namespace grpc {
class Server;
}  // namespace grpc

namespace gradsync {

// Its log, and gRPC's, goes to spdlog's default logger.
class InspectServer {
 public:
  // Listens at `socket` (mode 0600; this process's user and root may connect) and serves on threads
  // of its own. Errors are those of ListenAt; kInternal if gRPC does not start. `source` must
  // answer, if only with errors, until the server is destroyed.
  static Result<std::unique_ptr<InspectServer>> Start(const std::string& socket,
                                                      SnapshotSource source);

  // Ends the calls that are still running, removes the socket file, and waits for the threads.
  ~InspectServer();

  InspectServer(const InspectServer&) = delete;
  InspectServer& operator=(const InspectServer&) = delete;

  // The daemon is going down: health says NOT_SERVING, and Inspect answers UNAVAILABLE.
  // Thread-safe.
  void Drain();

 private:
  explicit InspectServer(SnapshotSource source);

  InspectService service_;
  std::unique_ptr<grpc::Server> server_;
  std::unique_ptr<Acceptor> acceptor_;
};

}  // namespace gradsync

#endif  // GRADSYNC_SERVER_INSPECT_INSPECT_SERVER_H_
