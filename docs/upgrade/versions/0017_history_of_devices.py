"""What reports of a device are found by, and the devices that a model ran on."""

from alembic import op

revision = "0017"
down_revision = "0016"


def upgrade() -> None:
    op.create_index("reports_of_a_device", "reports", ["device_id", "created_at"])
    op.create_index("reports_of_a_model_on_a_device", "reports", ["model_name", "device_id"])
