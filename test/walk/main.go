// Walk counts the functions, files and packages of the daemon that run during one call of
// a volume's life: `make walk`, as root. The least of three lives is shown, because what
// the daemon does beside a call counts too. With -v it names the functions.
package main

import (
	"context"
	"flag"
	"fmt"
	"os"
	"os/exec"
	"path"
	"path/filepath"
	"strings"
	"syscall"
	"time"

	"github.com/crust-proxy/crust-proxy/test/check"
	"github.com/crust-proxy/crust-proxy/test/rig"
	"github.com/crust-proxy/crust-proxy/test/rig/csivolume"
	"github.com/crust-proxy/crust-proxy/test/rig/kata"
)

const (
	module = "github.com/crust-proxy/crust-proxy/"
	lives  = 3
	policy = "policy: {rules: [{name: pods-in-sandboxes, drivers: [" + csivolume.DriverName + "], defer: true}]}"
)

func main() {
	names := flag.Bool("v", false, "name the functions")
	flag.Parse()
	os.Exit(rig.Run(func() int {
		if err := rig.Do(context.Background(), func(t rig.T) { walk(t, *names) }); err != nil {
			fmt.Fprintln(os.Stderr, err)
			return 1
		}
		return 0
	}, 0))
}

// walker is a daemon that tells what it ran.
type walker struct {
	t      rig.T
	daemon *rig.Daemon
	dir    string // where it writes what it counted
	least  map[string][]string
}

func walk(t rig.T, names bool) {
	w := &walker{t: t, daemon: rig.NewDaemon(t), least: make(map[string][]string)}
	w.daemon.Programs = w.daemon.Dir + "/bin"
	w.dir = w.daemon.Dir + "/covered"
	w.must(os.Mkdir(w.dir, 0o750))
	w.build()
	driver := csivolume.New(w.daemon, policy)
	w.must(driver.Process.Launch())
	w.daemon.Start("GOCOVERDIR=" + w.dir)
	driver.Wait(t)
	for life := range lives {
		w.live(driver.Create(t, fmt.Sprint("data", life), "ext4", 128<<20))
	}
	fmt.Println("call         functions  files  packages")
	for _, call := range []string{"stage", "publish", "stats", "unpublish", "unstage"} {
		w.tell(call, names)
	}
}

func (w *walker) must(err error) { w.t.Helper(); check.Must(w.t, err) }

func (w *walker) build() {
	w.must(os.Mkdir(w.daemon.Programs, 0o750))
	for _, program := range []string{"crust-driver", "crustctl"} {
		w.must(os.Symlink(rig.Program(w.t, program), w.daemon.Programs+"/"+program))
	}
	check.Run(w.t, exec.Command("go", "build", "-cover", "-covermode=atomic", "-coverpkg=./internal/...,./pkg/...,./test/walk/daemon", //nolint:gosec // our own path
		"-o", w.daemon.Programs+"/crust-proxy", "./test/walk/daemon"))
}

func (w *walker) live(v *csivolume.Volume) {
	v.For(fmt.Sprintf("4a5e7c2a-%s", v.ID))
	w.during("stage", v.Stage)
	w.during("publish", v.TryPublish)
	guest, err := kata.Boot("sandbox-"+filepath.Base(v.Pod), w.daemon.Kata, w.daemon.GoSandboxes, v.Target)
	w.must(err)
	w.during("stats", func() error { _, err := v.Stats(); return err })
	w.must(guest.Stop())
	w.during("unpublish", v.TryUnpublish)
	w.during("unstage", v.Unstage)
	v.Delete()
}

// during keeps what ran while a call was made, if it was less than in the lives before.
func (w *walker) during(name string, call func() error) {
	time.Sleep(time.Second / 2) // for what the daemon still does after the call before
	w.counted()
	w.must(call())
	if ran := w.counted(); w.least[name] == nil || len(ran) < len(w.least[name]) {
		w.least[name] = ran
	}
}

// counted lists the functions that ran since it was called last, as "file.go:12: name".
func (w *walker) counted() (ran []string) {
	w.daemon.Signal(syscall.SIGUSR1)
	files := w.dir + "/covcounters.*"
	check.Eventually(w.t, "counters", func() bool { written, _ := filepath.Glob(files); return len(written) > 0 })
	time.Sleep(100 * time.Millisecond) // for the file to be complete
	out := check.Value(exec.Command("go", "tool", "covdata", "func", "-i", w.dir).Output())(w.t)
	for line := range strings.Lines(string(out)) {
		fields := strings.Fields(line)
		if len(fields) == 3 && strings.HasPrefix(line, module) && !strings.HasPrefix(line, module+"test/") && fields[2] != "0.0%" {
			ran = append(ran, strings.TrimPrefix(fields[0], module)+" "+fields[1])
		}
	}
	written := check.Value(filepath.Glob(files))(w.t)
	for _, file := range written {
		w.must(os.Remove(file))
	}
	return ran
}

func (w *walker) tell(call string, names bool) {
	ran := w.least[call]
	files, packages := make(map[string]bool), make(map[string]bool)
	for _, function := range ran {
		file, _, _ := strings.Cut(function, ":")
		files[file], packages[path.Dir(file)] = true, true
	}
	fmt.Printf("%-12s %9d %6d %9d\n", call, len(ran), len(files), len(packages))
	if names {
		fmt.Println("  " + strings.Join(ran, "\n  "))
	}
}
