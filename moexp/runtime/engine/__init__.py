"""One step of the target, the same for AR, drafting and verification: `engine.Engine.run`."""
