"""The lab: a page with live queues, blocks, steps and waiting reasons, served on the gateway's admin HTTP listener."""
