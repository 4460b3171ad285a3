"""The commands of `etfarm`, one module each; a module is loaded only when its command is called. No command imports another."""
