// Memory and state that several processes share.
#include <unistd.h>

#include <chrono>
#include <csignal>
#include <string>

#include "tests/fakes/cuda/test_support.h"

namespace gradsync::fake_cuda {
namespace {

std::string Code(CUresult result) { return std::to_string(result); }

// What follows the "0 " of a good answer.
std::string Value(const std::string& answer) {
  EXPECT_EQ(answer.substr(0, 2), "0 ");
  return answer.substr(2);
}

class SharedMachineTest : public testing::Test {
 protected:
  Helper::Environment Shared() const { return {{"GRADSYNC_FAKE_CUDA_DIR", directory_.path()}}; }

  Directory directory_;
};

using IpcTest = SharedMachineTest;

TEST_F(IpcTest, MemoryOfCuMemAllocIsOpenedInAnotherProcess) {
  Helper exporter(Shared());
  Helper importer(Shared());
  // The second in its block: where it begins is not where the block does.
  ASSERT_EQ(exporter.Do({"init", "retain 0", "alloc 8", "alloc 100", "write 4242"}), "0");
  const std::string handle = Value(exporter.Do("export"));
  ASSERT_EQ(importer.Do({"init", "retain 0"}), "0");
  const std::string address = Value(importer.Do("open " + handle));
  EXPECT_EQ(importer.Do("read"), "0 4242");
  EXPECT_EQ(importer.Do("write 17"), "0");
  EXPECT_EQ(exporter.Do("read"), "0 17");
  // Opened again in the same context: the same address, and one more to close.
  EXPECT_EQ(Value(importer.Do("open " + handle)), address);
  EXPECT_EQ(importer.Do("close"), "0");
  EXPECT_EQ(importer.Do("read"), "0 17");
  EXPECT_EQ(importer.Do("close"), "0");
  EXPECT_EQ(importer.Do("close"), Code(CUDA_ERROR_INVALID_VALUE));
  EXPECT_EQ(exporter.Do("free"), "0");
  EXPECT_EQ(importer.Do("open " + handle).substr(0, 3), Code(CUDA_ERROR_INVALID_HANDLE));
}

TEST_F(IpcTest, TheExporterItselfCannotOpenIt) {
  Helper exporter(Shared());
  ASSERT_EQ(exporter.Do({"init", "retain 0", "alloc 100"}), "0");
  EXPECT_EQ(exporter.Do("open " + Value(exporter.Do("export"))).substr(0, 3),
            Code(CUDA_ERROR_INVALID_CONTEXT));
}

TEST_F(IpcTest, OnlyTheBaseOfAnAllocationIsExported) {
  Helper exporter(Shared());
  ASSERT_EQ(exporter.Do({"init", "retain 0", "create", "map"}), "0");
  EXPECT_EQ(exporter.Do("export").substr(0, 2), Code(CUDA_ERROR_INVALID_VALUE) + " ");
}

TEST_F(IpcTest, FreeingUnderAnImporterEndsTheProcess) {
  Helper exporter(Shared());
  Helper importer(Shared());
  ASSERT_EQ(exporter.Do({"init", "retain 0", "alloc 100"}), "0");
  ASSERT_EQ(importer.Do({"init", "retain 0"}), "0");
  Value(importer.Do("open " + Value(exporter.Do("export"))));
  EXPECT_EQ(exporter.Do("free"), "");
  EXPECT_EQ(exporter.Wait(), -SIGABRT);
  const std::string who = std::to_string(importer.pid());
  EXPECT_THAT(exporter.Errors(), testing::HasSubstr("fake CUDA: breach: memory is freed that "
                                                    "process " +
                                                    who + " still has open"));
  EXPECT_THAT(directory_.Read("breaches"), testing::HasSubstr("cuIpcOpenMemHandle"));
}

TEST_F(IpcTest, AnImporterThatDiedHoldsNothing) {
  Helper exporter(Shared());
  Helper importer(Shared());
  ASSERT_EQ(exporter.Do({"init", "retain 0", "alloc 100"}), "0");
  ASSERT_EQ(importer.Do({"init", "retain 0"}), "0");
  Value(importer.Do("open " + Value(exporter.Do("export"))));
  importer.Kill();
  importer.Wait();
  EXPECT_EQ(exporter.Do("free"), "0");
  EXPECT_EQ(exporter.Do("release 0"), "0");
  EXPECT_EQ(exporter.Exit(), 0);
}

TEST_F(IpcTest, AnExporterThatDiedLeavesTheMemoryToTheImporter) {
  Helper exporter(Shared());
  Helper importer(Shared());
  ASSERT_EQ(exporter.Do({"init", "retain 0", "alloc 100", "write 5"}), "0");
  ASSERT_EQ(importer.Do({"init", "retain 0"}), "0");
  const std::string handle = Value(exporter.Do("export"));
  Value(importer.Do("open " + handle));
  exporter.Kill();
  exporter.Wait();
  EXPECT_EQ(importer.Do("read"), "0 5");
  EXPECT_EQ(importer.Do("used"), "0 " + std::to_string(2 * kMiB));
  EXPECT_EQ(importer.Do("close"), "0");
  EXPECT_EQ(importer.Do("used"), "0 0");
  EXPECT_EQ(importer.Do("open " + handle).substr(0, 3), Code(CUDA_ERROR_INVALID_HANDLE));
}

TEST_F(IpcTest, MemoryIsCountedOverAllProcessesAndGivenBackByTheDead) {
  Helper::Environment environment = Shared();
  environment.emplace_back("GRADSYNC_FAKE_CUDA_MEMORY", std::to_string(8 * kMiB));
  Helper one(environment);
  Helper two(environment);
  ASSERT_EQ(one.Do({"init", "retain 0", "alloc 6000000"}), "0");
  ASSERT_EQ(two.Do({"init", "retain 0"}), "0");
  EXPECT_EQ(two.Do("used"), "0 " + std::to_string(6 * kMiB));
  EXPECT_EQ(two.Do("alloc 6000000"), Code(CUDA_ERROR_OUT_OF_MEMORY));
  EXPECT_EQ(two.Do("create"), "0");
  EXPECT_EQ(two.Do("alloc 1"), Code(CUDA_ERROR_OUT_OF_MEMORY));
  one.Kill();
  one.Wait();
  EXPECT_EQ(two.Do("alloc 6000000"), "0");
}

// The exporter is this process; the descriptor goes to the other by inheritance.
TEST_F(IpcTest, AHandleIsImportedAndItsMemoryOutlivesTheExporter) {
  ASSERT_EQ(cuInit(0), CUDA_SUCCESS);
  CUcontext context = nullptr;
  ASSERT_EQ(cuDevicePrimaryCtxRetain(&context, 0), CUDA_SUCCESS);
  ASSERT_EQ(cuCtxSetCurrent(context), CUDA_SUCCESS);
  const Mapped mapped = MapNew(2 * kMiB);
  WriteWord(mapped.address, 33);
  int fd = -1;
  ASSERT_EQ(
      cuMemExportToShareableHandle(&fd, mapped.handle, CU_MEM_HANDLE_TYPE_POSIX_FILE_DESCRIPTOR, 0),
      CUDA_SUCCESS);
  Helper importer(Shared(), {fd});
  close(fd);
  Unmap(mapped);
  EXPECT_EQ(importer.Do({"init", "retain 0"}), "0");
  EXPECT_EQ(importer.Do("import " + std::to_string(fd)), "0");
  EXPECT_EQ(importer.Do({"map", "read"}), "0 33");
  EXPECT_EQ(importer.Do("used"), "0 " + std::to_string(2 * kMiB));
  EXPECT_EQ(importer.Do("unmap"), "0");
  EXPECT_EQ(importer.Do("used"), "0 0");
  EXPECT_EQ(importer.Do("release 0"), "0");
  EXPECT_EQ(importer.Exit(), 0);
  EXPECT_EQ(cuCtxSetCurrent(nullptr), CUDA_SUCCESS);
  EXPECT_EQ(cuDevicePrimaryCtxRelease(0), CUDA_SUCCESS);
}

TEST_F(IpcTest, WithoutPeerAccessNoOtherDeviceReachesIt) {
  Helper::Environment environment = Shared();
  environment.emplace_back("GRADSYNC_FAKE_CUDA_PEER", "0");
  Helper exporter(environment);
  Helper importer(environment);
  ASSERT_EQ(exporter.Do({"init", "retain 0", "create", "map"}), "0");
  EXPECT_EQ(exporter.Do("access 1"), Code(CUDA_ERROR_INVALID_DEVICE));
  EXPECT_EQ(exporter.Do("access 0"), "0");
  ASSERT_EQ(exporter.Do("alloc 100"), "0");
  ASSERT_EQ(importer.Do({"init", "retain 1"}), "0");
  EXPECT_EQ(importer.Do("open " + Value(exporter.Do("export"))).substr(0, 3),
            Code(CUDA_ERROR_MAP_FAILED));
}

TEST_F(IpcTest, TheHostOfAnImporterCannotTouchItEither) {
  Helper exporter(Shared());
  Helper importer(Shared());
  ASSERT_EQ(exporter.Do({"init", "retain 0", "alloc 100"}), "0");
  ASSERT_EQ(importer.Do({"init", "retain 0"}), "0");
  Value(importer.Do("open " + Value(exporter.Do("export"))));
  EXPECT_EQ(importer.Do("touch"), "");
  EXPECT_NE(importer.Wait(), 0);
}

TEST_F(IpcTest, AnEventOrdersStreamsOfTwoProcesses) {
  Helper exporter(Shared());
  Helper importer(Shared());
  ASSERT_EQ(exporter.Do({"init", "retain 0", "page", "stream", "event"}), "0");
  ASSERT_EQ(importer.Do({"init", "retain 0", "stream"}), "0");
  const std::string handle = Value(exporter.Do("exportevent"));
  ASSERT_EQ(importer.Do("openevent " + handle), "0");
  EXPECT_EQ(importer.Do("recorded"), "0");  // not yet recorded: nothing to wait for
  EXPECT_EQ(exporter.Do({"await", "record"}), "0");
  EXPECT_EQ(importer.Do("recorded"), Code(CUDA_ERROR_NOT_READY));
  EXPECT_EQ(importer.Do("follow"), "0");
  EXPECT_EQ(importer.Do("query"), Code(CUDA_ERROR_NOT_READY));
  EXPECT_EQ(exporter.Do("set"), "0");
  EXPECT_EQ(importer.Do("wait"), "0");
  EXPECT_EQ(importer.Do("recorded"), "0");
  EXPECT_EQ(exporter.Do("openevent " + handle), Code(CUDA_ERROR_INVALID_CONTEXT));
  EXPECT_EQ(exporter.Do("noevent"), "0");
  EXPECT_EQ(importer.Do("recorded"), "");
  EXPECT_EQ(importer.Wait(), -SIGABRT);
  EXPECT_THAT(importer.Errors(), testing::HasSubstr("breach: use of an imported event"));
}

using LeakTest = SharedMachineTest;

TEST_F(LeakTest, WhatIsLeftAtTheEndIsWrittenDown) {
  Helper helper(Shared());
  ASSERT_EQ(
      helper.Do({"init", "retain 0", "alloc 100", "create", "map", "page", "stream", "event"}),
      "0");
  const std::string file = "leaks." + std::to_string(helper.pid());
  EXPECT_EQ(helper.Exit(), 0);
  const std::string leaks = directory_.Read(file);
  for (const char* what : {"allocation 0x", ", 100 bytes\n", "handle 0x", "mapping 0x",
                           "reservation 0x", "registration 0x", "stream\n", "event\n"}) {
    EXPECT_THAT(leaks, testing::HasSubstr(what));
  }
}

TEST_F(LeakTest, AProcessThatGaveAllBackWritesNothing) {
  Helper helper(Shared());
  ASSERT_EQ(helper.Do({"init", "retain 0", "alloc 100", "free", "stream", "nostream", "create",
                       "map", "unmap", "release 0"}),
            "0");
  const std::string file = "leaks." + std::to_string(helper.pid());
  EXPECT_EQ(helper.Exit(), 0);
  EXPECT_NE(access((directory_.path() + "/" + file).c_str(), F_OK), 0);
}

class InjectionTest : public SharedMachineTest {
 protected:
  Helper::Environment Inject(const std::string& what) const {
    Helper::Environment environment = Shared();
    environment.emplace_back("GRADSYNC_FAKE_CUDA_INJECT", what);
    environment.emplace_back("GRADSYNC_FAKE_CUDA_TRACE", directory_.path() + "/trace.%p");
    return environment;
  }
};

TEST_F(InjectionTest, ACallFailsWithoutHavingDoneAnything) {
  Helper helper(Inject("4:error=2,6:error=999"));
  EXPECT_EQ(helper.Do({"init", "retain 0"}), "0");  // three calls
  EXPECT_EQ(helper.Do("alloc 8"), "2");
  EXPECT_EQ(helper.Do("alloc 8"), "0");
  EXPECT_EQ(helper.Do("enter"), "999");
  EXPECT_EQ(helper.Do("enter"), "0");
  EXPECT_EQ(directory_.Read("trace." + std::to_string(helper.pid())),
            "1 cuInit\n2 cuDevicePrimaryCtxRetain\n3 cuCtxSetCurrent\n4 cuMemAlloc\n5 cuMemAlloc\n"
            "6 ncclAllReduce\n7 ncclAllReduce\n");
}

TEST_F(InjectionTest, ACallIsDelayed) {
  Helper helper(Inject("2:delay=50"));
  EXPECT_EQ(helper.Do("init"), "0");
  const auto before = std::chrono::steady_clock::now();
  EXPECT_EQ(helper.Do("count"), "0 2");
  EXPECT_GE(std::chrono::steady_clock::now() - before, std::chrono::milliseconds(50));
}

TEST_F(InjectionTest, ACallKillsTheProcess) {
  Helper helper(Inject("2:kill"));
  EXPECT_EQ(helper.Do("init"), "0");
  EXPECT_EQ(helper.Do("count"), "");
  EXPECT_EQ(helper.Wait(), -SIGKILL);
}

TEST_F(InjectionTest, WhatIsNoInjectionIsRefused) {
  for (const char* what : {"nonsense", "0:kill", "3:explode", "3:error", "1:lose=64"}) {
    Helper helper(Inject(what));
    EXPECT_EQ(helper.Do("init"), "") << what;
    EXPECT_EQ(helper.Wait(), -SIGABRT) << what;
  }
}

TEST_F(InjectionTest, ALostDeviceIsLostToEveryProcessAndForGood) {
  const std::string lost = Code(CUDA_ERROR_UNKNOWN);
  Helper other(Shared());
  ASSERT_EQ(
      other.Do({"init", "retain 0", "alloc 100", "page", "stream", "await", "event", "record"}),
      "0");
  EXPECT_EQ(other.Do("query"), Code(CUDA_ERROR_NOT_READY));
  Helper third(Shared());
  ASSERT_EQ(third.Do({"init", "retain 0", "page", "stream", "await"}), "0");
  Helper loser(Inject("5:lose=0"));
  ASSERT_EQ(loser.Do({"init", "retain 0", "create"}), "0");
  EXPECT_EQ(loser.Do("alloc 8"), lost);
  EXPECT_EQ(loser.Do("unmap").substr(0, 1), Code(CUDA_ERROR_INVALID_VALUE));  // nothing mapped
  // A wait that was blocked ends, and so does one that begins now.
  EXPECT_EQ(other.Do("wait"), lost);
  EXPECT_EQ(other.Do("query"), lost);
  EXPECT_EQ(other.Do("recorded"), lost);
  EXPECT_EQ(other.Do("free"), lost);
  EXPECT_EQ(other.Do("nostream"), lost);
  EXPECT_EQ(third.Do("sync"), lost);
  // The other device is there.
  EXPECT_EQ(other.Do({"retain 1", "alloc 8", "sync"}), "0");
  // A process that starts later finds it lost as well.
  Helper later(Shared());
  EXPECT_EQ(later.Do({"init", "retain 0"}), lost);
  // What cannot be given back is no leak.
  EXPECT_EQ(other.Do("free"), "0");
  const std::string file = "leaks." + std::to_string(other.pid());
  EXPECT_EQ(other.Exit(), 0);
  EXPECT_EQ(directory_.Read(file), "");
}

}  // namespace
}  // namespace gradsync::fake_cuda
