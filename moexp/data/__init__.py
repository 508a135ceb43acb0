"""Text that goes in: prompts, public benchmarks, corpora, and routing traces on disk."""
