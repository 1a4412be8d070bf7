// Exchange between the ranks of one host: each rank writes to its own slots and reads the others' slots.
//
// A round r is one piece of one tensor. A rank writes slot (rank, r mod 2), publishes r, waits until every other rank
// has published r, and reads their slots. Two slots are enough: a rank writes slot r + 2 only after all have published
// r + 1, which they do only when they have read r.
//
// Waiting spins, then yields, then sleeps on a futex. Every rank holds a lock on one byte of the memory file for as
// long as it lives; who sleeps looks at the lock of the rank that it waits for.

#ifndef _GNU_SOURCE
#define _GNU_SOURCE
#endif
#include <ATen/ATen.h>
#include <fcntl.h>
#include <linux/futex.h>
#include <sched.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <time.h>
#include <torch/csrc/inductor/aoti_torch/c/shim.h>
#include <torch/csrc/inductor/aoti_torch/utils.h>
#include <torch/library.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstring>
#include <mutex>
#include <sstream>
#include <stdexcept>
#include <string>
#include <vector>

#if defined(__x86_64__) && defined(__GNUC__) && !defined(__clang__)
#define PACELINE_CLONES __attribute__((target_clones("avx512f", "avx2", "default")))
#else
#define PACELINE_CLONES
#endif

namespace {

constexpr int kMaxDegree = 64;
constexpr size_t kSlotBytes = 256 << 10;
constexpr int kSpins = 300;  // some microseconds: a core that another process needs is given to it
constexpr double kYieldSeconds = 2e-3;
constexpr long kSleepNanoseconds = 20'000'000;  // between two looks at the other's lock

struct alignas(128) Mailbox {
  std::atomic<uint32_t> round;
  std::atomic<uint32_t> sleepers;  // ranks that wait for this one
  std::atomic<uint32_t> left;
  std::atomic<uint64_t> bytes[2];  // of the whole tensor of a round, to tell ranks that disagree
};

struct Memory {
  Mailbox box[kMaxDegree];
};

struct Group {
  int fd = -1;
  int rank = 0, degree = 0;
  double timeout = 0;
  size_t size = 0;
  uint32_t round = 0;
  std::string failure;
  Memory* memory = nullptr;

  char* slot(int owner, uint32_t r) const {
    return reinterpret_cast<char*>(memory) + sizeof(Memory) + (2 * static_cast<size_t>(owner) + (r & 1)) * kSlotBytes;
  }
};

std::mutex groups_lock;
std::vector<Group*> groups;  // by number; a number is taken again when its group has been closed
std::string last_failure;

double now() {
  timespec t;
  clock_gettime(CLOCK_MONOTONIC, &t);
  return t.tv_sec + 1e-9 * t.tv_nsec;
}

long futex(std::atomic<uint32_t>* word, int operation, uint32_t value, const timespec* limit) {
  return syscall(SYS_futex, word, operation, value, limit, nullptr, 0);
}

inline void pause() {
#if defined(__x86_64__)
  __builtin_ia32_pause();
#else
  std::atomic_signal_fence(std::memory_order_seq_cst);
#endif
}

bool holds_lock(const Group& group, int rank) {
  struct flock lock = {};
  lock.l_type = F_WRLCK;
  lock.l_whence = SEEK_SET;
  lock.l_start = rank;
  lock.l_len = 1;
  return fcntl(group.fd, F_OFD_GETLK, &lock) != 0 || lock.l_type != F_UNLCK;
}

[[noreturn]] void fail(Group& group, const std::string& reason) {
  std::ostringstream text;
  text << "rank " << group.rank << " of " << group.degree << ": " << reason;
  group.failure = text.str();
  {
    std::lock_guard<std::mutex> guard(groups_lock);
    last_failure = group.failure;
  }
  throw std::runtime_error(group.failure);
}

void wait_for(Group& group, int peer, double timeout) {
  Mailbox& box = group.memory->box[peer];
  const auto come = [&] {
    return static_cast<int32_t>(box.round.load(std::memory_order_acquire) - group.round) >= 0;
  };
  for (int i = 0; i < kSpins; i++) {
    if (come()) return;
    pause();
  }
  const double started = now();
  while (now() - started < std::min(kYieldSeconds, timeout)) {
    if (come()) return;
    sched_yield();
  }
  while (true) {
    const uint32_t seen = box.round.load();
    if (come()) return;
    box.sleepers.fetch_add(1);
    const timespec limit = {0, kSleepNanoseconds};
    if (box.round.load() == seen && box.left.load() == 0) futex(&box.round, FUTEX_WAIT, seen, &limit);
    box.sleepers.fetch_sub(1);
    if (come()) return;
    std::ostringstream who;
    who << "rank " << peer;
    if (box.left.load() != 0) fail(group, who.str() + " has left");
    if (!holds_lock(group, peer)) fail(group, who.str() + " has died");
    if (now() - started > timeout) {
      std::ostringstream text;
      text << who.str() << " has not come within " << timeout << " s";
      fail(group, text.str());
    }
  }
}

void wake(Mailbox& box) {
  if (box.sleepers.load() > 0) futex(&box.round, FUTEX_WAKE, INT32_MAX, nullptr);
}

// Exchanges `bytes` in pieces: read(first, length) is called when the slots of this round hold [first, first + length)
// of every rank's data.
template <typename Read>
void exchange(Group& group, const char* data, size_t bytes, double timeout, const Read& read) {
  if (!group.failure.empty()) throw std::runtime_error(group.failure);
  size_t first = 0;
  do {
    const size_t length = std::min(kSlotBytes, bytes - first);
    const uint32_t round = ++group.round;
    if (length > 0) std::memcpy(group.slot(group.rank, round), data + first, length);
    Mailbox& mine = group.memory->box[group.rank];
    mine.bytes[round & 1].store(bytes, std::memory_order_relaxed);
    mine.round.store(round);
    wake(mine);
    for (int peer = 0; peer < group.degree; peer++) {
      if (peer == group.rank) continue;
      wait_for(group, peer, timeout);
      const uint64_t theirs = group.memory->box[peer].bytes[round & 1].load(std::memory_order_relaxed);
      if (theirs != bytes) {
        std::ostringstream text;
        text << "rank " << peer << " exchanges " << theirs << " bytes where this rank exchanges " << bytes
             << ": they are not at the same operation";
        fail(group, text.str());
      }
    }
    if (length > 0) read(first, length);
    first += length;
  } while (first < bytes);
}

inline float from_bfloat16(uint16_t x) {
  const uint32_t bits = static_cast<uint32_t>(x) << 16;
  float value;
  std::memcpy(&value, &bits, 4);
  return value;
}

inline uint16_t to_bfloat16(float x) {  // to nearest, ties to even
  uint32_t bits;
  std::memcpy(&bits, &x, 4);
  const uint32_t rounded = (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
  return static_cast<uint16_t>(x != x ? 0x7fc0u : rounded);
}

PACELINE_CLONES void add_float(float* total, const float* term, size_t n) {
  for (size_t i = 0; i < n; i++) total[i] += term[i];
}

PACELINE_CLONES void widen(float* total, const uint16_t* term, size_t n) {
  for (size_t i = 0; i < n; i++) total[i] = from_bfloat16(term[i]);
}

PACELINE_CLONES void add_bfloat16(float* total, const uint16_t* term, size_t n) {
  for (size_t i = 0; i < n; i++) total[i] += from_bfloat16(term[i]);
}

PACELINE_CLONES void narrow(uint16_t* out, const float* total, size_t n) {
  for (size_t i = 0; i < n; i++) out[i] = to_bfloat16(total[i]);
}

constexpr size_t kBlock = 2048;  // floats of a partial sum: they stay in the first-level cache

void sum_bfloat16(const Group& group, char* out, size_t length) {
  alignas(64) float total[kBlock];
  const size_t count = length / 2;
  for (size_t at = 0; at < count; at += kBlock) {
    const size_t n = std::min(kBlock, count - at);
    for (int rank = 0; rank < group.degree; rank++) {
      const auto* term = reinterpret_cast<const uint16_t*>(group.slot(rank, group.round)) + at;
      rank == 0 ? widen(total, term, n) : add_bfloat16(total, term, n);
    }
    narrow(reinterpret_cast<uint16_t*>(out) + at, total, n);
  }
}

void sum_half(const Group& group, char* out, size_t length) {
  auto* to = reinterpret_cast<c10::Half*>(out);
  for (size_t i = 0; i < length / 2; i++) {
    float total = 0;
    for (int rank = 0; rank < group.degree; rank++) {
      const float term = reinterpret_cast<const c10::Half*>(group.slot(rank, group.round))[i];
      total = rank == 0 ? term : total + term;
    }
    to[i] = total;
  }
}

void sum_float(const Group& group, char* out, size_t length) {
  std::memcpy(out, group.slot(0, group.round), length);
  for (int rank = 1; rank < group.degree; rank++) {
    add_float(reinterpret_cast<float*>(out), reinterpret_cast<const float*>(group.slot(rank, group.round)), length / 4);
  }
}

Group& group_of(int64_t number) {
  std::lock_guard<std::mutex> guard(groups_lock);
  TORCH_CHECK(number >= 0 && number < static_cast<int64_t>(groups.size()) && groups[number] != nullptr,
              "there is no exchange ", number, " in this process");
  return *groups[number];
}

at::Tensor ranks_sum(const at::Tensor& x, int64_t number) {
  Group& group = group_of(number);
  const at::Tensor in = x.contiguous();
  at::Tensor out = at::empty(in.sizes(), in.options());
  const auto type = in.scalar_type();
  TORCH_CHECK(type == at::kBFloat16 || type == at::kFloat || type == at::kHalf, "ranks_sum of ", type);
  char* to = static_cast<char*>(out.data_ptr());
  exchange(group, static_cast<const char*>(in.data_ptr()), in.nbytes(), group.timeout, [&](size_t first, size_t length) {
    if (type == at::kBFloat16) sum_bfloat16(group, to + first, length);
    else if (type == at::kHalf) sum_half(group, to + first, length);
    else sum_float(group, to + first, length);
  });
  return out;
}

at::Tensor gather(const at::Tensor& x, int64_t degree, int64_t number, double timeout) {
  Group& group = group_of(number);
  TORCH_CHECK(degree == group.degree, "exchange ", number, " has ", group.degree, " ranks, not ", degree);
  const at::Tensor in = x.contiguous();
  std::vector<int64_t> sizes = {degree};
  sizes.insert(sizes.end(), in.sizes().begin(), in.sizes().end());
  at::Tensor out = at::empty(sizes, in.options());
  char* to = static_cast<char*>(out.data_ptr());
  const size_t bytes = in.nbytes();
  exchange(group, static_cast<const char*>(in.data_ptr()), bytes, timeout > 0 ? timeout : group.timeout,
           [&](size_t first, size_t length) {
             for (int rank = 0; rank < group.degree; rank++) {
               std::memcpy(to + rank * bytes + first, group.slot(rank, group.round), length);
             }
           });
  return out;
}

at::Tensor ranks_gather(const at::Tensor& x, int64_t degree, int64_t number) { return gather(x, degree, number, 0); }

at::Tensor ranks_gather_within(const at::Tensor& x, int64_t degree, int64_t number, double timeout) {
  return gather(x, degree, number, timeout);
}

at::Tensor ranks_sum_meta(const at::Tensor& x, int64_t) { return at::empty_symint(x.sym_sizes(), x.options()); }

at::Tensor ranks_gather_meta(const at::Tensor& x, int64_t degree, int64_t) {
  std::vector<c10::SymInt> sizes = {degree};
  sizes.insert(sizes.end(), x.sym_sizes().begin(), x.sym_sizes().end());
  return at::empty_symint(sizes, x.options());
}

template <typename Run>
AOTITorchError into(AtenTensorHandle* out, const Run& run) {
  AOTI_TORCH_CONVERT_EXCEPTION_TO_ERROR_CODE({ *out = torch::aot_inductor::new_tensor_handle(run()); });
}

}  // namespace

TORCH_LIBRARY(paceline, library) {
  library.def("ranks_sum(Tensor x, int group) -> Tensor");
  library.def("ranks_gather(Tensor x, int degree, int group) -> Tensor");
  library.def("ranks_gather_within(Tensor x, int degree, int group, float timeout_s) -> Tensor");
}

TORCH_LIBRARY_IMPL(paceline, CPU, library) {
  library.impl("ranks_sum", ranks_sum);
  library.impl("ranks_gather", ranks_gather);
  library.impl("ranks_gather_within", ranks_gather_within);
}

TORCH_LIBRARY_IMPL(paceline, Meta, library) {
  library.impl("ranks_sum", ranks_sum_meta);
  library.impl("ranks_gather", ranks_gather_meta);
}

extern "C" {

size_t paceline_ranks_bytes(int degree) { return sizeof(Memory) + 2 * static_cast<size_t>(degree) * kSlotBytes; }

// Takes over `fd`, an open file description of its own. The number of the exchange, or -1 with errno.
int64_t paceline_ranks_attach(int fd, int rank, int degree, double timeout) {
  struct flock lock = {};
  lock.l_type = F_WRLCK;
  lock.l_whence = SEEK_SET;
  lock.l_start = rank;
  lock.l_len = 1;
  if (fcntl(fd, F_OFD_SETLK, &lock) != 0) return -1;
  const size_t size = paceline_ranks_bytes(degree);
  void* memory = mmap(nullptr, size, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
  if (memory == MAP_FAILED) return -1;
  auto* group = new Group;
  group->fd = fd;
  group->rank = rank;
  group->degree = degree;
  group->timeout = timeout;
  group->size = size;
  group->memory = static_cast<Memory*>(memory);
  std::lock_guard<std::mutex> guard(groups_lock);
  const auto free = std::find(groups.begin(), groups.end(), nullptr);
  const int64_t number = free - groups.begin();
  if (free == groups.end()) groups.push_back(group);
  else *free = group;
  return number;
}

void paceline_ranks_close(int64_t number) {
  Group* group = nullptr;
  {
    std::lock_guard<std::mutex> guard(groups_lock);
    std::swap(group, groups[number]);
  }
  if (group == nullptr) return;
  Mailbox& mine = group->memory->box[group->rank];
  mine.left.store(1);
  wake(mine);
  munmap(group->memory, group->size);
  close(group->fd);
  delete group;
}

// Why the last exchange of this process failed; empty if none has.
size_t paceline_ranks_failure(char* text, size_t size) {
  std::lock_guard<std::mutex> guard(groups_lock);
  const size_t length = std::min(size, last_failure.size());
  std::memcpy(text, last_failure.data(), length);
  return length;
}

// What compiled models call, without the dispatcher and the interpreter.
AOTITorchError aoti_torch_cpu_ranks_sum(AtenTensorHandle x, int64_t group, AtenTensorHandle* out) {
  return into(out, [&] { return ranks_sum(*torch::aot_inductor::tensor_handle_to_tensor_pointer(x), group); });
}

AOTITorchError aoti_torch_cpu_ranks_gather(AtenTensorHandle x, int64_t degree, int64_t group, AtenTensorHandle* out) {
  return into(out, [&] { return ranks_gather(*torch::aot_inductor::tensor_handle_to_tensor_pointer(x), degree, group); });
}

}  // extern "C"
