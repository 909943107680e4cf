#include <gradsync/gradsync.h>
#include <stdio.h>

/* Without a daemon at the socket that it names: a clear error is what proves that the library
 * works. */
int main(void) {
  gradsync_session_options options = {.struct_size = sizeof(options)};
  gradsync_session* session = NULL;
  gradsync_error error = {0};
  options.socket = "/nonexistent/gradsyncd.sock";
  options.job = "consumer";
  options.world_size = 1;
  if (gradsync_session_open(&options, &session, &error) != GRADSYNC_DAEMON_LOST) return 1;
  printf("%s\n", error.message);
  return 0;
}
