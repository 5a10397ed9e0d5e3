// Takes the names of CUDA's allocator settings out of torch's register, before torch_npu registers its own.
//
// torch_npu registers the names of its allocator's settings when it is loaded, and a name that is there already ends
// the process in C++ ("Duplicated key 'pinned_reserve_segment_size_mb'"). A build of torch with CUDA libraries has
// registered such names. On a host with real devices the CPU build of torch is required for this reason; a development
// machine has the default build, and CUDA's settings mean nothing where a device is simulated.
//
// The register has no public function that removes a name, so its accessor is found by its mangled name. The names of
// torch itself stay: torch_npu relies on them. A torch without the register, or without CUDA's names, is left as it is.
#include <dlfcn.h>

#include <string>
#include <unordered_set>

// Returns how many names were taken out.
extern "C" __attribute__((visibility("default"))) int clear_keys() {
    using Keys = std::unordered_set<std::string>;
    static const Keys of_torch{
        "max_split_size_mb",         "max_non_split_rounding_mb",     "garbage_collection_threshold",
        "roundup_power2_divisions",  "expandable_segments",           "large_segment_size_mb",
        "pinned_max_cached_size_mb", "pinned_max_round_threshold_mb", "pinned_use_background_threads",
    };
    void *accessor =
        dlsym(RTLD_DEFAULT, "_ZN3c1016CachingAllocator26AcceleratorAllocatorConfig14getMutableKeysB5cxx11Ev");
    if (!accessor) return 0;
    Keys &keys = reinterpret_cast<Keys &(*)()>(accessor)();
    int removed = 0;
    for (auto key = keys.begin(); key != keys.end();) {
        if (of_torch.count(*key)) {
            ++key;
        } else {
            key = keys.erase(key);
            ++removed;
        }
    }
    return removed;
}
