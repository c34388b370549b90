"""LogitSpec Cluster's library: the decoding core, the engine that runs a target model, and retrieval.

Subpackages: `models` finds and loads target models; `decoding` drafts, verifies and samples tokens; `engine`
runs the step loop over a Hugging Face model; `retrieval` reads and serves the reference corpus. Nothing here
imports the packages above it (`serve_app`, `eval_jobs`, `corpus_builder`).
"""
