"""The real settings of every service, for checking command lines that start them."""

from collections.abc import Mapping, Sequence

import pytest

from fastserve_common.settings import Settings
from fastserve_gateway.settings import GatewaySettings
from fastserve_kvstore.settings import KvStoreSettings
from fastserve_scheduler.settings import SchedulerSettings
from fastserve_worker.settings import WorkerSettings

SETTINGS: Mapping[str, type[Settings]] = {
    "gateway": GatewaySettings,
    "kvstore": KvStoreSettings,
    "scheduler": SchedulerSettings,
    "worker": WorkerSettings,
}


def load(service: str, argv: Sequence[str], environment: Mapping[str, str]) -> Settings:
    """As the service itself would. Raises SettingsError; also for a FASTSERVE_ variable that is not a setting."""
    settings = SETTINGS[service]
    unknown = [
        name
        for name in environment
        if name.startswith("FASTSERVE_")
        and name.removeprefix("FASTSERVE_").lower() not in settings.model_fields
        and name != "FASTSERVE_KERNEL_CACHE"
    ]
    assert unknown == [], f"{service} has no such settings"
    with pytest.MonkeyPatch.context() as patch:
        for name, value in environment.items():
            patch.setenv(name, value)
        return settings.load(argv, prog=service)
