// Sizes of the head-page layout, shared by every op. Free of torch headers.
#pragma once

namespace kvplug {

constexpr int kPageTokens = 16;  // tokens in one head page
constexpr int kChunkPages = 64;  // pages behind one entry of the directory

}  // namespace kvplug
