package main

import (
	"encoding/json"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"strings"
	"time"

	"golang.org/x/sys/unix"

	"github.com/crust-proxy/crust-proxy/reference/loopdev"
	"github.com/crust-proxy/crust-proxy/test/rig"
	"github.com/crust-proxy/crust-proxy/test/rig/cri"
	"github.com/crust-proxy/crust-proxy/test/rig/csivolume"
	"github.com/crust-proxy/crust-proxy/test/rig/vmnode"
)

const (
	// vmMemory is what crust-vm gives a machine unless told otherwise, in MiB.
	vmMemory   = 512
	vmDiskSize = 512 << 20
)

// Each guest has the filesystem in two ways, which take turns: a copy that is mounted on
// the host and shared by virtio-fs, and a deferred volume.
const (
	shared = iota
	deferred
	ways
)

// wayMounts are places and filesystems as the guest sees them.
var wayMounts = [ways]struct{ dir, fs string }{{"/shared", "virtiofs"}, {"/deferred", "ext4"}}

// vmTestbed is a node with crust-vm.
type vmTestbed struct {
	r      *testbed
	n      *vmnode.Node
	volume *csivolume.Volume
	// copied is the device of the copy, and mounted where the host mounts it.
	copied, mounted string
	tools           string // programs for the guest
	files           int    // in a tree
	fioTime         time.Duration
	// samples are by what was measured, and by the way.
	samples map[string]*[ways][]float64
}

// vms measures what a pod in a virtual machine costs, and what its volume's way there does.
func vms(r *testbed) {
	rig.Need(r.t, "fio", "ldd")
	r.build("crust-vm", "crust-vm-agent", "crust-driver")
	b := &vmTestbed{
		r: r, mounted: r.t.TempDir(), tools: r.t.TempDir(),
		files: 2000, fioTime: 3 * time.Second, samples: make(map[string]*[ways][]float64),
	}
	rounds := 5
	if r.set.quick {
		rounds, b.files, b.fioTime = 1, 200, 100*time.Millisecond
	}
	b.n = vmnode.New(r.t, r.daemon.Programs)
	b.n.Configure(r.t, map[string]any{"memoryMiB": vmMemory})
	b.install()
	b.prepare()
	kvm := false
	for n := range rounds {
		kvm = b.round(n)
	}
	b.volume.Delete()
	b.report(kvm)
}

func (b *vmTestbed) add(what string, way int, value float64) {
	if b.samples[what] == nil {
		b.samples[what] = new([ways][]float64)
	}
	b.samples[what][way] = append(b.samples[what][way], value)
}

func (b *vmTestbed) time(what string, way int, d time.Duration) {
	b.add(what, way, float64(d)/float64(time.Millisecond))
}

// vmRow is a line of the table: medians, each of them told in the same way.
type vmRow struct {
	title, format string
	of            []string
	kind          int
	dataPath      bool // which is the emulation's where the processor is emulated
}

const (
	alone    = iota
	inTimes  // virtio-fs, in multiples of deferred
	together // virtio-fs, and deferred
)

var vmRows = []vmRow{
	{title: "a machine boots and its first container starts, p50", format: "%.0f ms", of: []string{"boot"}},
	{title: "a further container starts; one with a volume, which is plugged in and mounted, p50", format: "%.0f ms", of: []string{"start plain", "start plug"}},
	{title: "NodeGetVolumeStats to the guest and back, p50", format: "%.1f ms", of: []string{"stats"}},
	{title: "memory on the host of a machine of 512 MiB: QEMU; virtiofsd; page cache", format: "%.1f MiB", of: []string{"QEMU", "virtiofsd", "page cache"}},
	{title: "a tree of 2,000 files is walked by a new guest; again; after FUSE's second", format: "%.0f ms", of: []string{"cold", "warm", "later"}, kind: inTimes},
	{title: "a tree of 2,000 files is made", format: "%.0f ms", of: []string{"make"}, kind: inTimes},
	{title: "1,000 files are created; unlinked", format: "%.0f ms", of: []string{"create", "unlink"}, kind: inTimes},
	{title: "4 KiB at random, O_DIRECT: read; written", format: "%.0f us", of: []string{"randread", "randwrite"}, kind: inTimes, dataPath: true},
	{title: "4 KiB written at random, each with fdatasync", format: "%.0f us", of: []string{"fdatasync"}, kind: inTimes, dataPath: true},
	{title: "1 MiB in sequence, O_DIRECT: read; written", format: "%.0f us", of: []string{"read", "write"}, kind: inTimes, dataPath: true},
	{title: "descriptors on the host for the trees", format: "%.0f", of: []string{"files descriptors"}, kind: together},
	{title: "kernel memory and page cache on the host for the trees; page cache for a file of 64 MiB", format: "%.1f MiB", of: []string{"files kernel", "files page cache", "fio page cache"}, kind: together},
	{title: "CPU time of virtiofsd for all these files; for 15 s of fio", format: "%.2f s", of: []string{"files virtiofsd", "fio virtiofsd"}, kind: together},
	{title: "CPU time of QEMU for them", format: "%.2f s", of: []string{"files qemu", "fio qemu"}, kind: together, dataPath: true},
}

const (
	// fileSteps are those of the program files.
	fileSteps = "cold warm later make create unlink"
	// fio's jobs follow one another. The first one writes what the next ones read.
	fio = "/tools/ld-linux-x86-64.so.2 --library-path /tools /tools/fio --output-format=json " +
		"--name=global --filename=data --size=64m --ioengine=psync --thread --stonewall --time_based --runtime=%dms " +
		"--name=write --rw=write --bs=1m --direct=1 --name=read --rw=read --bs=1m --direct=1 " +
		"--name=randread --rw=randread --bs=4k --direct=1 --name=randwrite --rw=randwrite --bs=4k --direct=1 " +
		"--name=fdatasync --rw=randwrite --bs=4k --fdatasync=1"
)

// install puts fio with its libraries, and a program of ours, where the guest sees them.
func (b *vmTestbed) install() {
	b.r.must(rig.BuildStatic(b.tools+"/files", "test/bench/files"))
	program, err := exec.LookPath("fio")
	b.r.must(err)
	needs, err := exec.CommandContext(b.r.ctx, "ldd", program).Output()
	b.r.must(err)
	for _, word := range append(strings.Fields(string(needs)), program) {
		if filepath.IsAbs(word) {
			b.r.run("cp", "--dereference", word, b.tools)
		}
	}
}

// prepare makes the volume, with a tree, and the copy.
func (b *vmTestbed) prepare() {
	b.volume = b.n.Driver.Create(b.r.t, "bench", "ext4", vmDiskSize)
	b.volume.Publish()
	device, err := b.n.Device(b.volume)
	b.r.must(err)
	b.volume.Unpublish()
	b.r.must(unix.Mount(device, b.mounted, "ext4", 0, ""))
	b.r.run(b.tools+"/files", b.mounted, strconv.Itoa(b.files), "make")
	b.r.must(os.Rename(b.mounted+"/made", b.mounted+"/tree"))
	b.r.must(unix.Unmount(b.mounted, 0))
	image := b.n.Daemon.Dir + "/copy"
	b.r.run("cp", "--sparse=always", device, image)
	b.copied = rig.Loop(b.r.t, image, loopdev.Options{DirectIO: true}) // as the driver's
}

// round boots a machine in which the ways take turns, and tells whether KVM runs it. The
// host's mount is a new one, so that neither kernel knows the tree.
func (b *vmTestbed) round(n int) (kvm bool) {
	b.r.must(unix.Mount(b.copied, b.mounted, "ext4", 0, ""))
	b.volume.Publish()
	began := time.Now()
	pod, err := b.n.CRI.RunPod(b.r.ctx, b.volume.Pod, vmnode.Handler, 0)
	b.r.must(err)
	b.start(pod, "first")
	b.time("boot", shared, time.Since(began))
	volume := cri.Mount{Host: b.volume.Target, Container: wayMounts[deferred].dir}
	b.start(pod, "plain")
	b.start(pod, "plug", volume)
	p := b.processes(pod)
	b.add("QEMU", shared, p.pss(p.qemu))
	b.add("virtiofsd", shared, p.pss(p.virtiofsd...))
	b.add("page cache", shared, p.pageCache())
	container := b.start(pod, "main", volume, cri.Mount{Host: b.mounted, Container: wayMounts[shared].dir},
		cri.Mount{Host: b.tools, Container: "/tools", ReadOnly: true})
	for i := range ways {
		b.measure(p, container, (i+n)%ways)
	}
	for range max(10, b.r.set.scale(30)) {
		began := time.Now()
		_, err := b.volume.Stats()
		b.r.must(err)
		b.time("stats", shared, time.Since(began))
	}
	vmnode.End(b.r.ctx, b.r.t, pod)
	b.volume.Unpublish()
	b.r.must(unix.Unmount(b.mounted, 0))
	return p.kvm
}

func (b *vmTestbed) start(pod *cri.Pod, name string, mounts ...cri.Mount) string {
	began := time.Now()
	id, err := pod.Run(b.r.ctx, cri.Container{Name: name, Mounts: mounts})
	b.r.must(err)
	b.time("start "+name, shared, time.Since(began))
	return id
}

// measure takes one way in a machine.
func (b *vmTestbed) measure(p vmProcesses, container string, way int) {
	before := p.cost()
	at := wayMounts[way]
	files := fmt.Sprintf("/tools/files %s %d", at.dir, b.files)
	var took map[string]time.Duration
	b.exec(container, fmt.Sprintf("grep -q ' %s %s ' /proc/mounts && %s %s", at.dir, at.fs, files, fileSteps), &took)
	for step, d := range took {
		b.time(step, way, d)
	}
	between := p.cost()
	var said struct {
		Jobs []struct {
			Jobname     string
			Read, Write struct{ IOPS float64 }
		}
	}
	b.exec(container, fmt.Sprintf("%s clear >/dev/null && cd %s && "+fio, files, at.dir, b.fioTime.Milliseconds()), &said)
	for _, job := range said.Jobs {
		b.add(job.Jobname, way, 1e6/(job.Read.IOPS+job.Write.IOPS))
	}
	for what, value := range p.cost() {
		b.add("files "+what, way, between[what]-before[what])
		b.add("fio "+what, way, value-between[what])
	}
}

// exec runs a script that prints JSON.
func (b *vmTestbed) exec(container, script string, into any) {
	out, err := b.n.CRI.Exec(b.r.ctx, container, script)
	b.r.must(err)
	b.r.must(json.Unmarshal([]byte(out), into))
}

// report tells all where KVM runs the machines. Where QEMU emulates the processor, the data path is printed alone.
func (b *vmTestbed) report(kvm bool) {
	for _, row := range vmRows {
		texts := make([]string, len(row.of))
		for i, what := range row.of {
			texts[i] = b.text(row, what)
		}
		switch text := strings.Join(texts, "; "); {
		case kvm:
			b.r.sheet.tell("KVM: "+row.title, text)
		case row.dataPath:
			fmt.Printf("---  the processor is emulated, so this is no figure: %s: %s\n", row.title, text)
		default:
			b.r.sheet.tell("TCG: "+row.title, text)
		}
	}
}

func (b *vmTestbed) text(row vmRow, what string) string {
	all := b.samples[what]
	if all == nil || row.kind != alone && len(all[deferred]) == 0 {
		b.r.t.Fatalf("%s was not measured", what)
	}
	text := fmt.Sprintf(row.format, median(all[shared]))
	if row.kind == alone {
		return text
	}
	text += " to " + fmt.Sprintf(row.format, median(all[deferred]))
	if row.kind == inTimes {
		text = fmt.Sprintf("%.1fx (%s)", median(all[shared])/median(all[deferred]), text)
	}
	return text
}
