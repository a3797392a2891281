//go:build system

package kube_test

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"slices"
	"sync"
	"syscall"
	"time"

	"github.com/crust-proxy/crust-proxy/test/kube/cluster"
	"github.com/crust-proxy/crust-proxy/test/rig"
)

// faults has the two parts of a round go and come back.
type faults struct {
	k     *cluster.Kube
	round round
	using []*writer
	// gone is called when the first part has gone.
	gone func()
	rand *rand.Rand
	logf func(format string, args ...any)
}

func (f *faults) components(part string) []*rig.Process {
	if part == "driver" {
		return []*rig.Process{f.k.Drivers[cluster.Block].Process, f.k.Drivers[cluster.Native].Process}
	}
	return []*rig.Process{f.k.Components()[part]}
}

// down has a part end, by a kill or because it is asked to.
func (f *faults) down(part, how string) {
	f.k.T.Helper()
	for _, one := range f.components(part) {
		if how == "kill" {
			one.Kill()
		} else {
			f.k.Must(one.Stop())
		}
	}
	f.logf("%s: %s", part, how)
}

// up starts a part until it serves, as an init system does: one that needs another may end at first.
func (f *faults) up(part string) error {
	for _, one := range f.components(part) {
		for end := time.Now().Add(cluster.Patience); ; time.Sleep(time.Second) {
			err := one.Start()
			if err == nil {
				break
			}
			if one.Alive() || time.Now().After(end) {
				return fmt.Errorf("%s does not come back: %w", part, err)
			}
		}
	}
	f.logf("%s: serves again", part)
	return nil
}

// pause waits some time up to a bound.
func (f *faults) pause(most time.Duration) { time.Sleep(time.Duration(f.rand.Int64N(int64(most)))) }

// restarts takes both parts away and puts them back, in any order.
func (f *faults) restarts() {
	first, second := f.round.parts[0], f.round.parts[1]
	f.down(first, f.round.how)
	f.gone()
	f.pause(time.Second)
	f.down(second, f.round.how)
	f.killSides()
	f.pause(2 * time.Second)
	back := []string{first, second}
	f.rand.Shuffle(len(back), func(i, j int) { back[i], back[j] = back[j], back[i] })
	var waiting sync.WaitGroup
	problems := make([]error, len(back))
	for i, part := range back {
		waiting.Go(func() { problems[i] = f.up(part) })
		f.pause(time.Second)
	}
	waiting.Wait()
	f.k.Must(errors.Join(problems...))
}

// absence takes the API server away. Meanwhile each of the other parts is
// killed and comes back, and later is asked to end and comes back.
func (f *faults) absence() {
	others := slices.DeleteFunc(slices.Clone(f.round.parts), func(part string) bool { return part == apiServer })
	before := others[0] == f.round.parts[0]
	if before {
		f.down(others[0], "kill")
		f.gone()
		f.pause(time.Second)
	}
	f.down(apiServer, f.round.how)
	back := time.Now().Add(away())
	f.killSides()
	for i, part := range others {
		if i > 0 || !before {
			f.pause(time.Second)
			f.down(part, "kill")
		}
		if i == 0 && !before {
			f.gone()
		}
		f.pause(3 * time.Second)
		f.k.Must(f.up(part))
	}
	for _, part := range others {
		f.pause(5 * time.Second)
		f.down(part, "stop")
		f.pause(2 * time.Second)
		f.k.Must(f.up(part))
	}
	for _, w := range f.using {
		w.goesOn(f.k)
	}
	if !f.round.has("kubelet") { // which knows no pod then
		f.wantNewSides()
	}
	time.Sleep(time.Until(back))
	f.k.Must(f.up(apiServer))
}

// wantNewSides wants the containers that were killed to be restarted before the API server is back.
func (f *faults) wantNewSides() {
	f.k.T.Helper()
	for _, w := range f.using {
		f.k.Eventually("a container of pod "+w.Name+" is restarted without the API server", w.hasNewSide)
	}
	f.logf("containers were restarted")
}

// killSides kills a container of each pod that uses its volume: it is to be restarted with the volume.
func (f *faults) killSides() {
	for _, w := range f.using {
		f.k.Must(syscall.Kill(w.side, syscall.SIGKILL))
	}
	f.logf("a container of each pod in use: kill")
}

// hasNewSide tells whether the container side was started anew and has the volume.
func (w *writer) hasNewSide(context.Context) error {
	pid, err := w.Pid("side")
	if err != nil {
		return err
	}
	if pid == w.side {
		return errors.New("it has not ended yet")
	}
	if out, err := w.TryExec("side", gapless); err != nil {
		return fmt.Errorf("%s: %w", out, err)
	}
	w.side = pid
	return nil
}

// soon waits for what may not take long, and looks often.
func soon(k *cluster.Kube, what string, is func() bool) {
	k.T.Helper()
	for end := time.Now().Add(cluster.Patience); !is(); time.Sleep(time.Millisecond) {
		if time.Now().After(end) {
			k.T.Fatalf("%s: not within %v", what, cluster.Patience)
		}
	}
}
