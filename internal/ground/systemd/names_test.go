package systemd

import (
	"maps"
	"slices"
	"strings"
)

func keys[V any](of map[string]V) string {
	return strings.Join(slices.Sorted(maps.Keys(of)), ",")
}
