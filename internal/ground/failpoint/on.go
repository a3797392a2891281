//go:build failpoints

package failpoint

import (
	"fmt"
	"os"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"
)

type point struct {
	at    uint64 // the hit that counts; 0 means each
	kill  bool
	sleep time.Duration
}

// points is read when the process starts, before the program can change its environment.
var points = fromEnvironment()

func fromEnvironment() map[string]point {
	parsed, err := parse(os.Getenv("CRUST_FAILPOINTS"))
	if err != nil {
		// A misspelt failpoint would let a crash test pass without a crash.
		fmt.Fprintln(os.Stderr, "CRUST_FAILPOINTS:", err)
		os.Exit(2)
	}
	return parsed
}

var hits = struct {
	sync.Mutex
	of map[string]uint64
}{of: map[string]uint64{}}

// Hit runs the action that the environment sets for this point.
func Hit(name string) {
	p, ok := points[name]
	if !ok {
		return
	}
	hits.Lock()
	hits.of[name]++
	n := hits.of[name]
	hits.Unlock()
	if p.at != 0 && p.at != n {
		return
	}
	time.Sleep(p.sleep)
	if p.kill {
		_ = syscall.Kill(os.Getpid(), syscall.SIGKILL)
		select {} // nothing after this point may run
	}
}

func parse(list string) (map[string]point, error) {
	parsed := make(map[string]point)
	for _, entry := range strings.Split(list, ",") {
		if entry = strings.TrimSpace(entry); entry == "" {
			continue
		}
		name, action, ok := strings.Cut(entry, "=")
		if !ok {
			return nil, fmt.Errorf("%q has no action: name[@N]=kill or name[@N]=sleep:100ms", entry)
		}
		p, err := parseAction(action)
		if err != nil {
			return nil, err
		}
		if before, nth, ok := strings.Cut(name, "@"); ok {
			name = before
			if p.at, err = strconv.ParseUint(nth, 10, 64); err != nil || p.at == 0 {
				return nil, fmt.Errorf("%q: %q is not the number of a hit, from 1", entry, nth)
			}
		}
		parsed[name] = p
	}
	return parsed, nil
}

func parseAction(action string) (point, error) {
	if action == "kill" {
		return point{kill: true}, nil
	}
	if text, ok := strings.CutPrefix(action, "sleep:"); ok {
		d, err := time.ParseDuration(text)
		return point{sleep: d}, err
	}
	return point{}, fmt.Errorf("unknown action %q: kill or sleep:100ms", action)
}
