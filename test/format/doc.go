// Package format has the system tests of internal/mkfs: real devices, real programs and
// kills at each step.
package format
