package runc

import "testing"

func TestOnlyCommandsThatMountAreLookedAt(t *testing.T) {
	for command, want := range map[string]bool{
		"create": true, "run": true, "restore": true, "exec": false, "start": false, "delete": false, "state": false, "": false,
	} {
		if got := starts(command); got != want {
			t.Errorf("%q: %v", command, got)
		}
	}
}
