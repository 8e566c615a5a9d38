//! rap-tool
