// Looks at the machine for gradsyncctl doctor. Changes nothing, starts nothing; the daemon sees one
// connection that says no Hello.
#ifndef GRADSYNC_SERVER_CTL_DOCTOR_FACTS_H_
#define GRADSYNC_SERVER_CTL_DOCTOR_FACTS_H_

#include "client/core/starter.h"
#include "server/ctl/command_line.h"
#include "server/ctl/doctor.h"

namespace gradsync {

DoctorFacts CollectFacts(const CommandLine& command, const Discovery& discovery);

// The parts of that.
HostFacts CollectHost();
SocketFacts LookAtSocket(const std::string& path);
DirectoryFacts LookAtDirectory(const std::string& path);

}  // namespace gradsync

#endif  // GRADSYNC_SERVER_CTL_DOCTOR_FACTS_H_
