"""Tests under names of their own, for faults whose public name should be the id."""

from __future__ import annotations


class Registry(dict):
    """Test name -> function of the device."""

    def bug(self, name, *variants):
        """Registers a test, or one for each variant: (end of the name, arguments after device)."""

        def register(test):
            for suffix, *arguments in variants or [("",)]:
                key = f"{name}-{suffix}" if suffix else name
                assert key not in self, key
                self[key] = lambda device, arguments=tuple(arguments): test(device, *arguments)
            return test

        return register
