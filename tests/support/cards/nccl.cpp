// A backend that calls itself "nccl", refuses what NCCL refuses, and sends over gloo.
//
// NOTE [Late results]
// A collective of NCCL has not run when its call returns: until `wait()` its outputs hold nothing, and its inputs must
// stay. Here outputs are filled with bits that are NaN (or -1) until `wait()`, and `wait()` raises an error if somebody
// wrote the inputs or the outputs meanwhile. Of each group the collectives run one after another, in a thread.
//
// NOTE [NCCL never raises in wait]
// If a peer is lost, a collective of NCCL does not end: `wait()` returns, and the next wait of the host for the device
// blocks. So here an exception of gloo is no exception: the device is stuck until the communicator is aborted, or until
// torch's watchdog ends the process. `lose_silently(false)` is the other kind of loss: NCCL itself sees that the peer is
// lost, and the watchdog ends the process at once.
#include "device.h"

#include <torch/csrc/distributed/c10d/Backend.hpp>
#include <torch/csrc/distributed/c10d/reducer_timer.hpp>
#include <torch/csrc/utils/pybind.h>
#include <torch/extension.h>

#include <condition_variable>
#include <cstdlib>
#include <deque>
#include <iostream>
#include <mutex>
#include <thread>

namespace cards {
namespace {

using namespace c10d;
using Tensors = std::vector<at::Tensor>;
template <typename T>
using Ptr = c10::intrusive_ptr<T>;
using Clock = std::chrono::steady_clock;

std::mutex log_mutex;
std::vector<std::string> collective_log;
std::atomic<bool> logging{false}, silent_loss{true};
PyObject* fault = nullptr;  // (group, operation, number in the group) -> "" or "hang"

std::string description(const at::Tensor& x) {
  std::ostringstream text;
  text << c10::toString(x.scalar_type()) << x.sizes();
  if (!x.is_contiguous()) text << " strides " << x.strides();
  return text.str();
}

// Runs functions one after another in a thread of its own, which lives as long as the process.
class Queue {
 public:
  void add(std::function<void()> function) {
    std::lock_guard<std::mutex> lock(state_->mutex);
    if (!state_->started) {
      state_->started = true;
      std::thread([state = state_] { state->run(); }).detach();
    }
    state_->functions.push_back(std::move(function));
    state_->changed.notify_one();
  }

 private:
  struct State {
    std::mutex mutex;
    std::condition_variable changed;
    std::deque<std::function<void()>> functions;
    bool started = false;
    void run() {
      while (true) {
        std::unique_lock<std::mutex> lock(mutex);
        changed.wait(lock, [this] { return !functions.empty(); });
        auto function = std::move(functions.front());
        functions.pop_front();
        lock.unlock();
        function();
      }
    }
  };
  std::shared_ptr<State> state_ = std::make_shared<State>();
};

// The bytes of a tensor of the device that lies densely in memory.
char* bytes_of(const at::Tensor& x) { return static_cast<char*>(x.data_ptr()); }
bool same_bytes(const at::Tensor& x, const at::Tensor& y) { return std::memcmp(bytes_of(x), bytes_of(y), x.nbytes()) == 0; }

struct Communicator {
  std::string name;
  std::atomic<bool> aborted{false};
};

// A collective that was started. `inputs` and `outputs` are tensors of the host on the memory of the caller's.
class LateWork : public Work {
 public:
  std::string label;
  std::shared_ptr<Communicator> communicator;
  Tensors inputs, sent, outputs, results, returned;
  Clock::time_point deadline;

  void begin() {
    for (auto& x : inputs) sent.push_back(x.clone(at::MemoryFormat::Preserve));
    for (auto& x : outputs) {
      results.push_back(at::empty_like(x, x.options(), at::MemoryFormat::Preserve));
      std::memset(bytes_of(x), 0xff, x.nbytes());
    }
  }

  void run(const std::function<void(LateWork&)>& collective) {
    try {
      at::NoGradGuard no_grad;
      collective(*this);
    } catch (const std::logic_error& differs) {
      error_ = differs.what();
    } catch (const std::exception& lost) {
      lose(lost.what());
    }
    std::lock_guard<std::mutex> lock(mutex_);
    finished_ = true;
    if (future_ && deliver()) future_->markCompleted(c10::IValue(returned));
    changed_.notify_all();
  }

  // The peers never come.
  void lose(const std::string& why) {
    std::lock_guard<std::mutex> lock(mutex_);
    lost_ = finished_ = true;
    reason_ = why;
    set_stuck([communicator = communicator] { return communicator->aborted.load(); });
    changed_.notify_all();
  }

  bool wait(std::chrono::milliseconds) override {
    std::unique_lock<std::mutex> lock(mutex_);
    while (!finished_ && !communicator->aborted) changed_.wait_for(lock, std::chrono::milliseconds(5));
    deliver();
    TORCH_CHECK(error_.empty(), error_);
    return true;
  }
  void synchronize() override { wait(kNoTimeout); }
  bool isCompleted() override { return finished(); }
  bool isSuccess() const override { return !lost_; }
  std::vector<at::Tensor> result() override { return returned; }

  Ptr<c10::ivalue::Future> getFuture() override {
    std::lock_guard<std::mutex> lock(mutex_);
    if (!future_) {
      future_ = c10::make_intrusive<c10::ivalue::Future>(c10::ListType::create(c10::TensorType::get()));
      if (finished_ && deliver()) future_->markCompleted(c10::IValue(returned));
    }
    return future_;
  }

  bool finished() {
    std::lock_guard<std::mutex> lock(mutex_);
    return finished_ && !lost_;
  }
  std::string lost() {
    std::lock_guard<std::mutex> lock(mutex_);
    return lost_ ? reason_ : "";
  }

 private:
  // Writes the results to the caller's memory, once; returns false if there are none.
  bool deliver() {
    if (!finished_ || lost_) return false;
    if (std::exchange(delivered_, true)) return true;
    for (size_t i = 0; i < inputs.size(); ++i)
      if (error_.empty() && !written_by_us(inputs[i]) && !same_bytes(inputs[i], sent[i]))
        error_ = label + ": its input was written before wait()";
    for (size_t i = 0; i < outputs.size(); ++i) {
      const char* bytes = bytes_of(outputs[i]);
      for (size_t b = 0; b < outputs[i].nbytes() && error_.empty(); ++b)
        if (static_cast<unsigned char>(bytes[b]) != 0xff) error_ = label + ": its output was written before wait()";
      std::memcpy(bytes_of(outputs[i]), bytes_of(results[i]), results[i].nbytes());
    }
    return true;
  }

  bool written_by_us(const at::Tensor& x) const {
    for (auto& y : outputs) {
      const auto *begin = bytes_of(y), *end = begin + y.nbytes();
      if (x.nbytes() && bytes_of(x) < end && begin < bytes_of(x) + x.nbytes()) return true;
    }
    return false;
  }

  std::mutex mutex_;
  std::condition_variable changed_;
  bool finished_ = false, lost_ = false, delivered_ = false;
  std::string error_, reason_;
  Ptr<c10::ivalue::Future> future_;
};

// ---- torch's watchdog: it ends the process

class Watchdog {
 public:
  static void watch(Ptr<LateWork> work) {
    static auto* watchdog = new Watchdog;
    std::lock_guard<std::mutex> lock(watchdog->mutex_);
    watchdog->works_.push_back(std::move(work));
    if (!std::exchange(watchdog->started_, true)) std::thread([] { watchdog->run(); }).detach();
  }

 private:
  void run() {
    while (true) {
      std::this_thread::sleep_for(std::chrono::milliseconds(100));
      std::lock_guard<std::mutex> lock(mutex_);
      std::deque<Ptr<LateWork>> rest;
      for (auto& work : works_) {
        if (work->finished() || work->communicator->aborted) continue;
        const auto reason = work->lost();
        if (Clock::now() > work->deadline) end(work->label + " timed out");
        if (!reason.empty() && !silent_loss) end(work->label + ": " + reason);
        rest.push_back(work);
      }
      works_.swap(rest);
    }
  }

  static void end(const std::string& reason) {
    const char* handling = std::getenv("TORCH_NCCL_ASYNC_ERROR_HANDLING");
    if (handling && std::string(handling) == "0") return;
    std::cerr << "Watchdog caught collective operation timeout or error: " << reason << std::endl;
    std::abort();
  }

  std::mutex mutex_;
  std::deque<Ptr<LateWork>> works_;
  bool started_ = false;
};

// ---- what DistributedDataParallel asks a device for: the times of its events, by the host's clock

class DeviceTimer final : public Timer {
 public:
  explicit DeviceTimer(c10::Device) {}
  std::optional<int64_t> measureDifference(Event start, Event end) override {
    const auto from = getTimeRef(start), to = getTimeRef(end);
    if (from < 0 || to < from) return std::nullopt;
    return to - from;
  }
};
C10_REGISTER_TYPED_CLASS(TimerRegistry, c10::kCUDA, DeviceTimer);

// ---- the backend

class PretendedNccl : public Backend {
 public:
  PretendedNccl(int rank, int size, Ptr<Backend> gloo, Ptr<Options> options, std::string name)
      : Backend(rank, size), gloo_(std::move(gloo)), options_(std::move(options)) {
    communicator_->name = std::move(name);
    gloo_->setTimeout(std::chrono::hours(24 * 20));  // Nothing but the watchdog ends a collective.
  }

  // Of an aborted communicator a thread may wait for a peer forever, and gloo's end would wait for that thread.
  ~PretendedNccl() override {
    if (communicator_->aborted) (void)gloo_.release();
  }

  const std::string getBackendName() const override { return "nccl"; }
  Ptr<Options> getBackendOptions() override { return options_; }
  void setTimeout(std::chrono::milliseconds timeout) override { options_->timeout = timeout; }
  bool supportsCoalescing() const override { return true; }
  bool supportsSplitting() const override { return true; }
  void eagerConnectSingleDevice(at::Device) override {}
  void setSequenceNumberForGroup() override {}
  uint64_t getSequenceNumberForGroup() override { return number_; }
  void abort() override { communicator_->aborted = true; }
  void shutdown() override {}

  // All ranks of this communicator enter, as they enter ncclCommSplit.
  void enter_split() {
    ++splits_;
    gloo_->barrier()->wait();
  }
  int splits() const { return splits_; }

  void startCoalescing() override { coalesced_.clear(); coalescing_ = true; }
  Ptr<Work> endCoalescing() override {
    coalescing_ = false;
    return c10::make_intrusive<AllOf>(std::move(coalesced_));
  }

  Ptr<Work> broadcast(Tensors& x, const BroadcastOptions& options) override {
    return collective("broadcast", x, x, x, true, [=, gloo = gloo_](LateWork& work) {
      Tensors values{flat(work.sent[0])};
      gloo->broadcast(values, options)->wait();
      flat(work.results[0]).copy_(values[0]);
    });
  }

  Ptr<Work> allreduce(Tensors& x, const AllreduceOptions& options) override {
    return sums("allreduce", x, options.reduceOp);
  }

  Ptr<Work> allreduce_coalesced(Tensors& x, const AllreduceCoalescedOptions& options) override {
    for (auto& y : x)
      TORCH_CHECK_TYPE(y.scalar_type() == x[0].scalar_type(), "Tensors must have identical type");
    return sums("allreduce_coalesced", x, options.reduceOp);
  }

  Ptr<Work> reduce(Tensors& x, const ReduceOptions& options) override {
    return collective("reduce", x, x, x, true, [=, this](LateWork& work) {
      const auto total = summed(flat(work.sent[0]), options.reduceOp);
      flat(work.results[0]).copy_(getRank() == options.rootRank ? total : flat(work.sent[0]));
    });
  }

  Ptr<Work> _allgather_base(at::Tensor& out, at::Tensor& x, const AllgatherOptions&) override {
    Tensors outs{out}, ins{x};
    return allgather_into_tensor_coalesced(outs, ins, {});
  }

  Ptr<Work> allgather_into_tensor_coalesced(Tensors& outs, Tensors& ins, const AllgatherOptions&) override {
    for (size_t i = 0; i < ins.size(); ++i) expect_type(outs[i], ins[i]);
    return collective("allgather_into_tensor", ins, outs, outs, true, [=, this](LateWork& work) {
      for (size_t i = 0; i < work.sent.size(); ++i) {
        const auto parts = gathered(flat(work.sent[i]));
        flat(work.results[i]).copy_(at::cat(parts));
      }
    });
  }

  Ptr<Work> allgather(std::vector<Tensors>& outs, Tensors& x, const AllgatherOptions&) override {
    for (auto& out : outs[0]) expect_type(out, x[0]);
    return collective("allgather", x, outs[0], outs[0], false, [=, this](LateWork& work) {
      // Ranks may have parts of different sizes, as NCCL sends them one by one.
      for (int rank = 0; rank < getSize(); ++rank) {
        Tensors part{rank == getRank() ? flat(work.sent[0]).clone() : flat(work.results[rank])};
        BroadcastOptions options;
        options.rootRank = rank;
        if (part[0].numel()) gloo_->broadcast(part, options)->wait();
        flat(work.results[rank]).copy_(part[0]);
      }
    });
  }

  Ptr<Work> _reduce_scatter_base(at::Tensor& out, at::Tensor& x, const ReduceScatterOptions& options) override {
    Tensors outs{out}, ins{x};
    return reduce_scatter_tensor_coalesced(outs, ins, options);
  }

  Ptr<Work> reduce_scatter_tensor_coalesced(Tensors& outs, Tensors& ins, const ReduceScatterOptions& options) override {
    for (size_t i = 0; i < ins.size(); ++i) expect_type(outs[i], ins[i]);
    return collective("reduce_scatter_tensor", ins, outs, outs, true, [=, this](LateWork& work) {
      for (size_t i = 0; i < work.sent.size(); ++i) {
        const auto total = summed(flat(work.sent[i]), options.reduceOp);
        flat(work.results[i]).copy_(total.view({getSize(), -1})[getRank()]);
      }
    });
  }

  Ptr<Work> reduce_scatter(Tensors& outs, std::vector<Tensors>& ins, const ReduceScatterOptions& options) override {
    return collective("reduce_scatter", ins[0], outs, outs, false, [=, this](LateWork& work) {
      for (int rank = 0; rank < getSize(); ++rank) {
        const auto total = summed(flat(work.sent[rank]), options.reduceOp);
        if (rank == getRank()) flat(work.results[0]).copy_(total);
      }
    });
  }

  Ptr<Work> gather(std::vector<Tensors>& outs, Tensors& x, const GatherOptions& options) override {
    Tensors written = outs.empty() ? Tensors{} : outs[0];
    return collective("gather", x, written, written, false, [=, this](LateWork& work) {
      const auto parts = gathered(flat(work.sent[0]));
      for (size_t i = 0; i < work.results.size(); ++i) flat(work.results[i]).copy_(parts[i]);
    });
  }

  Ptr<Work> scatter(Tensors& outs, std::vector<Tensors>& ins, const ScatterOptions& options) override {
    Tensors read = ins.empty() ? Tensors{} : ins[0];
    return collective("scatter", read, outs, outs, false, [=, this](LateWork& work) {
      Tensors part{flat(work.results[0])};
      std::vector<Tensors> parts;
      if (getRank() == options.rootRank) parts.push_back(flats(work.sent));
      gloo_->scatter(part, parts, options)->wait();
    });
  }

  Ptr<Work> alltoall_base(at::Tensor& out, at::Tensor& x, std::vector<int64_t>& out_sizes,
                          std::vector<int64_t>& in_sizes, const AllToAllOptions& options) override {
    expect_type(out, x);
    Tensors outs{out}, ins{x};
    return collective("alltoall_base", ins, outs, outs, false, [=, this](LateWork& work) mutable {
      gloo_->alltoall_base(work.results[0], work.sent[0], out_sizes, in_sizes, options)->wait();
    });
  }

  Ptr<Work> alltoall(Tensors& outs, Tensors& ins, const AllToAllOptions&) override {
    return collective("alltoall", ins, outs, outs, false, [=, this](LateWork& work) {
      std::vector<int64_t> out_sizes, in_sizes;
      for (auto& y : work.results) out_sizes.push_back(y.numel());
      for (auto& y : work.sent) in_sizes.push_back(y.numel());
      auto sent = at::cat(flats(work.sent));
      auto received = at::empty({std::accumulate(out_sizes.begin(), out_sizes.end(), int64_t{0})}, sent.options());
      gloo_->alltoall_base(received, sent, out_sizes, in_sizes, {})->wait();
      const auto parts = received.split_with_sizes(out_sizes);
      for (size_t i = 0; i < parts.size(); ++i) flat(work.results[i]).copy_(parts[i]);
    });
  }

  Ptr<Work> send(Tensors& x, int to, int tag) override {
    return start("send to " + std::to_string(to), x, {}, x, sends_[to], [=, gloo = gloo_](LateWork& work) {
      Tensors values{flat(work.sent[0])};
      gloo->send(values, to, tag)->wait();
    });
  }

  Ptr<Work> recv(Tensors& x, int from, int tag) override {
    return start("recv from " + std::to_string(from), {}, x, x, receives_[from], [=, gloo = gloo_](LateWork& work) {
      Tensors values{flat(work.results[0])};
      gloo->recv(values, from, tag)->wait();
    });
  }

  Ptr<Work> barrier(const BarrierOptions& options) override {
    auto work = collective("barrier", {}, {}, {}, false, [gloo = gloo_](LateWork&) { gloo->barrier()->wait(); });
    report("barrier", 0);
    work->wait(kNoTimeout);
    wait_for_device();  // NCCL's barrier blocks the host.
    return work;
  }

 private:
  struct AllOf : public Work {
    std::vector<Ptr<Work>> works;
    explicit AllOf(std::vector<Ptr<Work>> all) : works(std::move(all)) {}
    bool wait(std::chrono::milliseconds timeout) override {
      for (auto& work : works) work->wait(timeout);
      return true;
    }
    bool isCompleted() override {
      return std::all_of(works.begin(), works.end(), [](auto& work) { return work->isCompleted(); });
    }
    bool isSuccess() const override { return true; }
    void synchronize() override { wait(kNoTimeout); }
  };

  static void expect_type(const at::Tensor& out, const at::Tensor& x) {
    TORCH_CHECK_TYPE(out.scalar_type() == x.scalar_type(), "output tensor must have the same type as input tensor");
  }
  static at::Tensor flat(const at::Tensor& x) { return x.as_strided({x.numel()}, {1}, x.storage_offset()); }
  static Tensors flats(const Tensors& xs) {
    Tensors all;
    for (auto& x : xs) all.push_back(flat(x));
    return all;
  }

  void expect_sendable(const at::Tensor& x, const std::string& operation, bool may_be_permuted) const {
    TORCH_CHECK_VALUE(x.is_cuda() && !x.is_sparse(), "Tensors must be CUDA and dense (", operation, ")");
    TORCH_CHECK_VALUE(may_be_permuted ? x.is_non_overlapping_and_dense() : x.is_contiguous(),
                      "Tensors must be contiguous (", operation, ")");
    switch (x.scalar_type()) {
      case at::kChar: case at::kByte: case at::kInt: case at::kLong: case at::kHalf: case at::kFloat: case at::kDouble:
      case at::kBool: case at::kBFloat16: case at::kFloat8_e4m3fn: case at::kFloat8_e5m2: return;
      default: TORCH_CHECK_TYPE(false, "Input tensor data type is not supported for NCCL process group: ",
                                x.scalar_type(), " (", operation, ")");
    }
  }

  at::Tensor summed(const at::Tensor& x, const ReduceOp& how) const {
    if (!x.numel()) return x.clone();
    const bool truth = x.scalar_type() == at::kBool, mean = how == ReduceOp::AVG;
    AllreduceOptions options;
    options.reduceOp = mean ? ReduceOp(ReduceOp::SUM) : truth && how == ReduceOp::SUM ? ReduceOp(ReduceOp::MAX) : how;
    Tensors values{truth ? x.to(at::kByte) : x.clone()};
    gloo_->allreduce(values, options)->wait();
    if (mean) values[0].div_(getSize());
    return values[0].to(x.scalar_type());
  }

  Tensors gathered(const at::Tensor& x) const {
    std::vector<Tensors> parts{{}};
    for (int rank = 0; rank < getSize(); ++rank) parts[0].push_back(at::empty_like(x));
    Tensors values{x};
    if (x.numel()) gloo_->allgather(parts, values)->wait();
    return parts[0];
  }

  Ptr<Work> sums(const std::string& operation, Tensors& x, const ReduceOp& how) {
    return collective(operation, x, x, x, true, [=, this](LateWork& work) {
      for (size_t i = 0; i < work.sent.size(); ++i) flat(work.results[i]).copy_(summed(flat(work.sent[i]), how));
    });
  }

  // Starts a collective. Before it runs, ranks compare what they call: with `alike` also sizes and strides.
  Ptr<Work> collective(const std::string& operation, const Tensors& inputs, const Tensors& outputs,
                       const Tensors& returned, bool alike, std::function<void(LateWork&)> run) {
    std::string call = operation;
    if (alike)
      for (auto& x : inputs) call += " " + description(x);
    const bool in_place = operation.rfind("allreduce", 0) == 0 || operation == "broadcast" || operation == "reduce";
    for (auto& x : inputs) expect_sendable(x, operation, in_place);
    for (auto& x : outputs) expect_sendable(x, operation, in_place);
    return start(call, inputs, outputs, returned, collectives_, [=, this](LateWork& work) {
      expect_same_call(call);
      run(work);
    });
  }

  void expect_same_call(const std::string& call) const {
    const auto digest = static_cast<int64_t>(std::hash<std::string>()(call));
    const auto digests = gathered(at::full({1}, digest, at::kLong));
    for (int rank = 0; rank < getSize(); ++rank) {
      if (digests[rank].item<int64_t>() == digest) continue;
      const auto difference = "ranks call different collectives, or with other sizes or strides: rank " +
                              std::to_string(getRank()) + " of " + communicator_->name + " calls " + call +
                              ", and rank " + std::to_string(rank) + " does not";
      // NCCL itself sees no difference, and most often never ends. An error tells more, where nobody asks for that.
      if (std::getenv("AUTOTP_TESTS_CARDS_DIFFERENCES_HANG")) throw std::runtime_error(difference);
      throw std::logic_error(difference);
    }
  }

  Ptr<Work> start(const std::string& call, const Tensors& inputs, const Tensors& outputs, const Tensors& returned,
                  Queue& queue, std::function<void(LateWork&)> run) {
    if (communicator_->aborted)
      C10_THROW_ERROR(DistBackendError, "NCCL communicator was aborted on rank " + std::to_string(getRank()) + ".");
    ++number_;
    if (logging) {
      std::lock_guard<std::mutex> lock(log_mutex);
      collective_log.push_back(communicator_->name + ": " + call);
    }
    auto work = c10::make_intrusive<LateWork>();
    work->label = communicator_->name + ": " + call;
    work->communicator = communicator_;
    work->returned = returned;
    work->deadline = Clock::now() + options_->timeout;
    for (auto& x : inputs) work->inputs.push_back(on_host(x));
    for (auto& x : outputs) work->outputs.push_back(on_host(x));
    work->begin();
    Watchdog::watch(work);
    if (is_stuck() || asked_fault(call) == "hang") work->lose("it never ends");
    else queue.add([work, run] { work->run(run); });
    if (coalescing_) coalesced_.push_back(work);
    return work;
  }

  std::string asked_fault(const std::string& call) const {
    if (!fault) return "";
    py::gil_scoped_acquire gil;
    return py::cast<std::string>(py::reinterpret_borrow<py::object>(py::handle(fault))(communicator_->name, call, number_));
  }

  Ptr<Backend> gloo_;
  Ptr<Options> options_;
  std::shared_ptr<Communicator> communicator_ = std::make_shared<Communicator>();
  Queue collectives_;
  std::map<int, Queue> sends_, receives_;
  std::vector<Ptr<Work>> coalesced_;
  bool coalescing_ = false;
  uint64_t number_ = 0;
  int splits_ = 0;
};

}  // namespace

void bind_device(py::module_& m);

void bind_nccl(py::module_& m) {
  py::class_<PretendedNccl, Ptr<PretendedNccl>, Backend>(m, "PretendedNccl")
      .def(py::init([](int rank, int size, Ptr<Backend> gloo, Ptr<Backend::Options> options, std::string name) {
        return c10::make_intrusive<PretendedNccl>(rank, size, gloo,
                                                  options, std::move(name));
      }))
      .def_property_readonly("options", [](PretendedNccl& group) { return group.getBackendOptions(); })
      .def("enter_split", &PretendedNccl::enter_split, py::call_guard<py::gil_scoped_release>())
      .def("perform_nocolor_split", [](PretendedNccl& group, py::object) {
        py::gil_scoped_release no_gil;
        group.enter_split();
      })
      .def("comm_split_count", &PretendedNccl::splits);
  m.def("set_logging", [](bool on) {
    std::lock_guard<std::mutex> lock(log_mutex);
    collective_log.clear();
    logging = on;
  });
  m.def("collective_log", [] {
    std::lock_guard<std::mutex> lock(log_mutex);
    return collective_log;
  });
  m.def("set_fault", [](py::object function) { fault = function.is_none() ? nullptr : function.release().ptr(); });
  m.def("lose_silently", [](bool silently) { silent_loss = silently; });
}

}  // namespace cards

PYBIND11_MODULE(TORCH_EXTENSION_NAME, m) {
  py::module_::import("torch.distributed");
  cards::bind_device(m);
  cards::bind_nccl(m);
}
