// The C++ library functions that the kernels need, for prebuilt libraries, which depend on the C library
// only. Failed allocation ends the process, as an exception in an OpenMP thread would.

#include <cstdlib>
#include <new>

static void* checked(void* memory) {
  if (!memory) std::abort();
  return memory;
}

void* operator new(std::size_t size) { return checked(std::malloc(size ? size : 1)); }
void* operator new[](std::size_t size) { return operator new(size); }
void* operator new(std::size_t size, std::align_val_t alignment) {
  const std::size_t multiple = static_cast<std::size_t>(alignment);
  return checked(std::aligned_alloc(multiple, (size + multiple - 1) / multiple * multiple));
}
void* operator new[](std::size_t size, std::align_val_t alignment) { return operator new(size, alignment); }

void operator delete(void* memory) noexcept { std::free(memory); }
void operator delete[](void* memory) noexcept { std::free(memory); }
void operator delete(void* memory, std::size_t) noexcept { std::free(memory); }
void operator delete[](void* memory, std::size_t) noexcept { std::free(memory); }
void operator delete(void* memory, std::align_val_t) noexcept { std::free(memory); }
void operator delete[](void* memory, std::align_val_t) noexcept { std::free(memory); }
void operator delete(void* memory, std::size_t, std::align_val_t) noexcept { std::free(memory); }
void operator delete[](void* memory, std::size_t, std::align_val_t) noexcept { std::free(memory); }

// libc++ calls this instead of throwing.
#ifdef _LIBCPP_VERSION
void std::__libcpp_verbose_abort(const char*, ...) noexcept { std::abort(); }
#endif
