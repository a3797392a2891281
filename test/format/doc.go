// Package format has the system tests of internal/disk/mkfs: real devices, real programs and kills at each step.
package format
