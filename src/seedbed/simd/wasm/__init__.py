"""Programs as functions of a WebAssembly module, which run one example at a time in any browser."""
