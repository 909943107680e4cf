#include <cstdio>
#include <gradsync/gradsync.hpp>

int main() {
  gradsync::client::SessionOptions options;
  options.socket = "/nonexistent/gradsyncd.sock";
  options.job = "consumer";
  options.world_size = 1;
  const auto session = gradsync::client::Session::Open(options);
  if (session || session.error().code != GRADSYNC_DAEMON_LOST) return 1;
  std::puts(session.error().ToString().c_str());
  return 0;
}
