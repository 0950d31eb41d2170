"""Settings of the `checkpointing` section."""

from rl.core.config import ConfigModel, operational


class CheckpointingConfig(ConfigModel):
    """When checkpoints are saved and which are kept."""

    enabled: bool = operational(True, description="Save checkpoints.")
    save_period: int = operational(10, ge=1, description="Steps between checkpoints.")
    keep_top_k: int | None = operational(3, ge=0, description="Best checkpoints kept beside the latest; null = all.")
    metric_name: str | None = operational("val:accuracy", description="val:<name> or train:<name>; null = newest.")
    higher_is_better: bool = operational(True, description="Direction of the metric.")
    save_optimizer: bool = operational(True, description="Save optimizer state; needed for an exact resume.")
    stop_timeout_s: float = operational(
        600.0, gt=0, description="Seconds that a stop leaves the phase under way; then it is abandoned."
    )
    export_hf: bool = operational(True, description="Export the final weights in Hugging Face format to <run>/export.")
