"""Faults that an engine test can switch on inside vLLM's worker, by collective_rpc."""

from rl.generation.vllm.receiver import RefitExtension, TandemWeightEngine


class RefitProbe(RefitExtension):
    """The product's extension with switches."""

    def probe_packing(self, enabled: bool, checked: bool) -> None:
        """Pack tied output layers at the end of a refit or not; compare them with their weights or not."""
        engine = self.weight_transfer_engine
        engine.pack_heads = (  # type: ignore[method-assign]
            TandemWeightEngine.pack_heads.__get__(engine) if enabled else lambda heads: None
        )
        engine._check_heads = (  # type: ignore[method-assign]
            TandemWeightEngine._check_heads.__get__(engine) if checked else lambda: None
        )
