// The .ptd files of a program: weights that are not in the .pte, looked up by their key.
#pragma once

#include <memory>
#include <optional>
#include <set>
#include <string>
#include <string_view>
#include <vector>

#include <executorch/extension/data_loader/mmap_data_loader.h>
#include <executorch/extension/flat_tensor/flat_tensor_data_map.h>
#include <executorch/extension/named_data_map/merged_data_map.h>
#include <executorch/runtime/core/named_data_map.h>

namespace etfarm {

// All files as one map, which records the keys that it was asked for and does not have. ExecuTorch gets it even without any
// file, because XNNPACK dereferences the null pointer of an absent map.
class DataFiles final : public executorch::runtime::NamedDataMap {
 public:
  explicit DataFiles(const std::vector<std::string>& paths);

  // Returns the missing keys requested since the last call, without those that `own` has.
  std::vector<std::string> take_missing(const executorch::runtime::NamedDataMap* own) const;

  executorch::runtime::Result<const executorch::runtime::TensorLayout> get_tensor_layout(std::string_view key) const override;
  executorch::runtime::Result<executorch::runtime::FreeableBuffer> get_data(std::string_view key) const override;
  executorch::runtime::Error load_data_into(std::string_view key, void* buffer, std::size_t size) const override;
  executorch::runtime::Result<std::uint32_t> get_num_keys() const override;
  executorch::runtime::Result<const char*> get_key(std::uint32_t index) const override;

 private:
  const executorch::runtime::NamedDataMap* map() const;

  std::vector<std::unique_ptr<executorch::extension::MmapDataLoader>> loaders_;
  std::vector<std::unique_ptr<executorch::extension::FlatTensorDataMap>> files_;
  std::optional<executorch::extension::merged_data_map::MergedDataMap> merged_;
  mutable std::set<std::string> missing_;
};

// A file that is mapped into memory.
std::unique_ptr<executorch::extension::MmapDataLoader> map_file(const std::string& path);

}  // namespace etfarm
