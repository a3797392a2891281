package main

import (
	"bufio"
	"crypto/sha256"
	"encoding/base64"
	"encoding/json"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"slices"
	"time"

	"golang.org/x/sys/unix"

	"github.com/crust-proxy/crust-proxy/internal/kataemu"
	"github.com/crust-proxy/crust-proxy/internal/loopdev"
)

// guest is the inside of a sandbox.
type guest struct {
	mount, loop, idFile string
	shim                *kataemu.Shim
	writes              byte
}

// playSandbox is the sandbox's process: DIR ID TARGET.
func playSandbox(args []string) error {
	if err := makePrivate(); err != nil {
		return err
	}
	g, err := boot(args[0], args[1], args[2])
	if err != nil {
		fmt.Println("failed", err)
		return err
	}
	fmt.Println("ok", g.loop)
	lines := bufio.NewScanner(os.Stdin)
	for lines.Scan() {
		answer, err := g.obey(lines.Text())
		if err != nil {
			fmt.Println("failed", err)
			continue
		}
		fmt.Println("ok", answer)
		if lines.Text() == "stop" {
			return nil
		}
	}
	_, err = g.obey("stop")
	return err
}

// boot finds the volume by its mount's source, as Kata does, attaches the device
// as a VMM does, plainly, and mounts it where only this namespace sees it.
func boot(dir, id, target string) (*guest, error) {
	volume := filepath.Join(dir, "kata", base64.URLEncoding.EncodeToString([]byte(target)))
	raw, err := os.ReadFile(volume + "/mountInfo.json") //nolint:gosec // the demo's own directory
	if err != nil {
		return nil, err
	}
	var info struct {
		Device string `json:"device"`
		FSType string `json:"fstype"`
	}
	if err := json.Unmarshal(raw, &info); err != nil {
		return nil, err
	}
	g := &guest{mount: dir + "/guest-" + id, idFile: filepath.Join(volume, id)}
	if g.loop, err = loopdev.Attach(info.Device, loopdev.Options{}); err != nil {
		return nil, err
	}
	if err := g.serve(dir, id, info.Device, info.FSType); err != nil {
		return nil, errors.Join(err, unix.Unmount(g.mount, unix.MNT_DETACH), loopdev.Detach(g.loop))
	}
	return g, nil
}

// serve mounts the volume, answers for it, and leaves its id as Kata does.
func (g *guest) serve(dir, id, device, fsType string) (err error) {
	if err := os.MkdirAll(g.mount, 0o700); err != nil {
		return err
	}
	if err := unix.Mount(g.loop, g.mount, fsType, 0, ""); err != nil {
		return err
	}
	g.shim, err = kataemu.Start(kataemu.Options{
		Flavor: kataemu.Go, SandboxID: id, Sandboxes: dir + "/vc",
		Mounts: map[string]kataemu.Statfs{device: kataemu.MountedAt(g.mount)},
	})
	if err != nil {
		return err
	}
	return os.WriteFile(g.idFile, nil, 0o600)
}

func (g *guest) obey(command string) (string, error) {
	switch command {
	case "write":
		return g.write()
	case "df":
		var st unix.Statfs_t
		err := unix.Statfs(g.mount, &st)
		return fmt.Sprint(uint64(st.Bsize)*st.Blocks, " ", uint64(st.Bsize)*(st.Blocks-st.Bfree)), err //nolint:gosec // a block size is positive
	case "stop":
		return "", errors.Join(g.shim.Stop(), unix.Unmount(g.mount, 0), loopdev.Detach(g.loop))
	default:
		return "", fmt.Errorf("unknown command %q", command)
	}
}

const dataSize = 20 << 20

// write writes data that is new each time, a MiB after the other to the disk, and
// tells its checksum and when it was done.
func (g *guest) write() (string, error) {
	g.writes++
	seed := [32]byte{g.writes, byte(os.Getpid()), byte(os.Getpid() >> 8)}
	data := make([]byte, dataSize)
	_, _ = rand.NewChaCha8(seed).Read(data) // never fails
	file, err := os.Create(g.mount + "/data")
	if err != nil {
		return "", err
	}
	for part := range slices.Chunk(data, 1<<20) {
		if _, err = file.Write(part); err != nil {
			break
		}
		if err = file.Sync(); err != nil {
			break
		}
	}
	if err = errors.Join(err, file.Close()); err != nil {
		return "", err
	}
	return fmt.Sprintf("%x %d", sha256.Sum256(data), time.Now().UnixNano()), nil
}

// peek mounts the disk read-only in a namespace of its own and tells the
// checksum of the data.
func peek(device, dir string) error {
	if err := makePrivate(); err != nil {
		return err
	}
	if err := unix.Mount(device, dir, "ext4", unix.MS_RDONLY, ""); err != nil {
		return err
	}
	raw, err := os.ReadFile(dir + "/data") //nolint:gosec // the demo's own directory
	if err == nil {
		fmt.Printf("%x", sha256.Sum256(raw))
	}
	return errors.Join(err, unix.Unmount(dir, 0))
}
