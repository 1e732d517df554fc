// Calls of functions that were written down, one after the other.

#include <array>
#include <cstdint>
#include <cstdio>
#include <exception>
#include <utility>

namespace {

constexpr std::size_t MOST = 64;  // operands of a function
constexpr std::size_t MESSAGE = 256;

using Caller = void (*)(int64_t function, const int64_t* operands);

template <std::size_t... I>
void call(int64_t function, const int64_t* operands, std::index_sequence<I...>) {
  reinterpret_cast<void (*)(decltype(static_cast<int64_t>(I))...)>(function)(operands[I]...);
}

template <std::size_t... COUNTS>
constexpr std::array<Caller, sizeof...(COUNTS)> all_callers(std::index_sequence<COUNTS...>) {
  return {[](int64_t function, const int64_t* operands) { call(function, operands, std::make_index_sequence<COUNTS>()); }...};
}

constexpr auto CALLERS = all_callers(std::make_index_sequence<MOST + 1>());

}  // namespace

// `numbers`: for each call the address of a function, how many operands it has, and these, each an address or an integer. `message`
// gets what the first function that fails says, and the others are not called; it stays as it is if none fails.
extern "C" void run_calls(const int64_t* numbers, const int64_t* end, char* message) {
  try {
    while (numbers < end) {
      const int64_t function = numbers[0], count = numbers[1];
      CALLERS[count](function, numbers + 2);
      numbers += 2 + count;
    }
  } catch (const std::exception& error) {
    std::snprintf(message, MESSAGE, "%s", error.what());
  } catch (...) {
    std::snprintf(message, MESSAGE, "unknown error");
  }
}
