"""``@override`` factories that torchtitan activates by name through ``override.imports``."""
