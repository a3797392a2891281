// Package fsops tests reference/fsops on the real kernel.
package fsops
