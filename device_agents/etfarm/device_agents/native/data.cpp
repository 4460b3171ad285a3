#include "data.h"

#include "session.h"

namespace etfarm {

using executorch::extension::FlatTensorDataMap;
using executorch::extension::MmapDataLoader;
using executorch::extension::merged_data_map::MergedDataMap;
using executorch::runtime::Error;
using executorch::runtime::FreeableBuffer;
using executorch::runtime::NamedDataMap;
using executorch::runtime::Result;
using executorch::runtime::TensorLayout;

std::unique_ptr<MmapDataLoader> map_file(const std::string& path) {
  auto loader = unwrap(MmapDataLoader::from(path.c_str(), MmapDataLoader::MlockConfig::NoMlock), "cannot open " + path);
  return std::make_unique<MmapDataLoader>(std::move(loader));
}

DataFiles::DataFiles(const std::vector<std::string>& paths) {
  std::vector<const NamedDataMap*> maps;
  for (const auto& path : paths) {
    loaders_.push_back(map_file(path));
    files_.push_back(std::make_unique<FlatTensorDataMap>(unwrap(FlatTensorDataMap::load(loaders_.back().get()), "cannot read " + path)));
    maps.push_back(files_.back().get());
  }
  if (maps.size() > 1) merged_.emplace(unwrap(MergedDataMap::load({maps.data(), maps.size()}), "data files contradict each other"));
}

const NamedDataMap* DataFiles::map() const {
  if (merged_) return &*merged_;
  return files_.empty() ? nullptr : files_[0].get();
}

std::vector<std::string> DataFiles::take_missing(const NamedDataMap* own) const {
  std::vector<std::string> names;
  for (const auto& name : missing_) {
    if (!own || !own->get_data(name).ok()) names.push_back(name);
  }
  missing_.clear();
  return names;
}

Result<const TensorLayout> DataFiles::get_tensor_layout(std::string_view key) const {
  // A Result of a constant cannot be moved, so an existing entry is looked up twice.
  if (map() && map()->get_tensor_layout(key).error() != Error::NotFound) return map()->get_tensor_layout(key);
  missing_.emplace(key);
  return Error::NotFound;
}

Result<FreeableBuffer> DataFiles::get_data(std::string_view key) const {
  auto data = map() ? map()->get_data(key) : Result<FreeableBuffer>(Error::NotFound);
  if (data.error() == Error::NotFound) missing_.emplace(key);
  return data;
}

Error DataFiles::load_data_into(std::string_view key, void* buffer, std::size_t size) const {
  const Error error = map() ? map()->load_data_into(key, buffer, size) : Error::NotFound;
  if (error == Error::NotFound) missing_.emplace(key);
  return error;
}

Result<std::uint32_t> DataFiles::get_num_keys() const { return map() ? map()->get_num_keys() : Result<std::uint32_t>(0); }

Result<const char*> DataFiles::get_key(std::uint32_t index) const {
  return map() ? map()->get_key(index) : Result<const char*>(Error::InvalidArgument);
}

}  // namespace etfarm
