"""Copies of a farm's rows and artifacts between the engines that can hold them, for migrations, backups and restores."""
