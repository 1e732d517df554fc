"""Post-training: steps of LoRA beside PEFT with FSDP2, and of DPO beside TRL's DPOTrainer, on the peers' shapes."""
