package cri

import (
	"archive/tar"
	"bytes"
	"context"
	"crypto/sha256"
	"encoding/hex"
	"encoding/json"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"runtime"
	"slices"
	"strings"
	"time"

	contentapi "github.com/containerd/containerd/api/services/content/v1"
	imagesapi "github.com/containerd/containerd/api/services/images/v1"
	"github.com/containerd/containerd/api/types"
	"google.golang.org/grpc/codes"
	"google.golang.org/grpc/metadata"
	"google.golang.org/grpc/status"
	runtimeapi "k8s.io/cri-api/pkg/apis/runtime/v1"

	"github.com/crust-proxy/crust-proxy/test/check"
)

// The images that a node has. Both are busybox: the pause container sleeps.
const (
	PauseImage   = "localhost/pause:1"
	BusyboxImage = "localhost/busybox:1"
)

const (
	layerType    = "application/vnd.oci.image.layer.v1.tar"
	configType   = "application/vnd.oci.image.config.v1+json"
	manifestType = "application/vnd.oci.image.manifest.v1+json"
)

type object map[string]any

func (n *Node) importImages() error {
	layer, err := busyboxLayer()
	if err != nil {
		return err
	}
	return errors.Join(n.AddImage(PauseImage, layer, []string{"/bin/sleep", "2147483647"}), n.AddImage(BusyboxImage, layer, []string{"/bin/sh"}))
}

// AddImage gives the node an image of one layer, an uncompressed tar, as a pull would,
// and waits until CRI has heard of it. An image that the node has stays as it is.
func (n *Node) AddImage(name string, layer []byte, entrypoint []string) error {
	if err := n.importImage(name, layer, entrypoint); err != nil {
		return fmt.Errorf("import %s: %w", name, err)
	}
	client := runtimeapi.NewImageServiceClient(n.conn)
	return check.Until(importTime, 5*time.Millisecond, func() error {
		reply, err := client.ImageStatus(context.Background(), &runtimeapi.ImageStatusRequest{Image: &runtimeapi.ImageSpec{Image: name}})
		if err == nil && reply.GetImage() == nil {
			err = errors.New("CRI does not see the image " + name)
		}
		return err
	})
}

func (n *Node) importImage(name string, layer []byte, command []string) error {
	config, err := json.Marshal(object{
		"architecture": runtime.GOARCH, "os": "linux",
		"config": object{"Entrypoint": command, "Env": []string{"PATH=/bin"}},
		"rootfs": object{"type": "layers", "diff_ids": []string{digest(layer)}},
	})
	if err != nil {
		return err
	}
	manifest, err := json.Marshal(object{
		"schemaVersion": 2, "mediaType": manifestType,
		"config": descriptor(configType, config), "layers": []object{descriptor(layerType, layer)},
	})
	if err != nil {
		return err
	}
	for _, blob := range [][]byte{layer, config, manifest} {
		if err := n.writeBlob(blob); err != nil {
			return err
		}
	}
	_, err = imagesapi.NewImagesClient(n.conn).Create(inKubernetes(context.Background()), &imagesapi.CreateImageRequest{
		Image: &imagesapi.Image{
			Name:   name,
			Labels: map[string]string{"io.cri-containerd.image": "managed", "io.cri-containerd.pinned": "pinned"},
			Target: &types.Descriptor{MediaType: manifestType, Digest: digest(manifest), Size: int64(len(manifest))},
		},
	})
	if status.Code(err) == codes.AlreadyExists { // from another test on this node
		return nil
	}
	return err
}

func descriptor(mediaType string, blob []byte) object {
	return object{"mediaType": mediaType, "digest": digest(blob), "size": len(blob)}
}

func digest(blob []byte) string {
	sum := sha256.Sum256(blob)
	return "sha256:" + hex.EncodeToString(sum[:])
}

func inKubernetes(ctx context.Context) context.Context {
	return metadata.AppendToOutgoingContext(ctx, "containerd-namespace", "k8s.io")
}

// largest is what goes into one message.
const largest = 8 << 20

// writeBlob stores content, with a label that keeps it from the collector.
func (n *Node) writeBlob(blob []byte) error {
	content := contentapi.NewContentClient(n.conn)
	ctx, cancel := context.WithTimeout(inKubernetes(context.Background()), importTime)
	defer cancel()
	if _, err := content.Info(ctx, &contentapi.InfoRequest{Digest: digest(blob)}); err == nil {
		return nil
	}
	stream, err := content.Write(ctx)
	if err != nil {
		return err
	}
	send := func(request *contentapi.WriteContentRequest) error {
		request.Ref, request.Total, request.Expected = digest(blob), int64(len(blob)), digest(blob)
		if err := stream.Send(request); err != nil {
			return err
		}
		_, err := stream.Recv()
		return err
	}
	offset := int64(0)
	for part := range slices.Chunk(blob, largest) {
		if err := send(&contentapi.WriteContentRequest{Action: contentapi.WriteAction_WRITE, Offset: offset, Data: part}); err != nil {
			return err
		}
		offset += int64(len(part))
	}
	err = send(&contentapi.WriteContentRequest{
		Action: contentapi.WriteAction_COMMIT, Offset: offset,
		Labels: map[string]string{"containerd.io/gc.root": time.Now().UTC().Format(time.RFC3339)},
	})
	if err != nil {
		return err
	}
	return stream.CloseSend()
}

// busyboxLayer is a root filesystem of the machine's static busybox.
func busyboxLayer() ([]byte, error) {
	path, err := exec.LookPath("busybox")
	if err != nil {
		return nil, err
	}
	program, err := os.ReadFile(path)
	if err != nil {
		return nil, err
	}
	applets, err := exec.Command(path, "--list").Output()
	if err != nil {
		return nil, fmt.Errorf("ask busybox for its applets: %w", err)
	}
	entries := []tar.Header{
		{Name: "bin/", Typeflag: tar.TypeDir}, {Name: "tmp/", Typeflag: tar.TypeDir}, {Name: "etc/", Typeflag: tar.TypeDir},
		{Name: "bin/busybox", Typeflag: tar.TypeReg, Size: int64(len(program))},
	}
	for _, applet := range strings.Fields(string(applets)) {
		if applet != "busybox" {
			entries = append(entries, tar.Header{Name: "bin/" + applet, Typeflag: tar.TypeSymlink, Linkname: "busybox"})
		}
	}
	return pack(entries, program)
}

// pack writes a tar in which every file has the same content.
func pack(entries []tar.Header, content []byte) ([]byte, error) {
	var out bytes.Buffer
	w := tar.NewWriter(&out)
	for _, entry := range entries {
		entry.Mode = 0o755
		if err := w.WriteHeader(&entry); err != nil {
			return nil, err
		}
		if entry.Size == 0 {
			continue
		}
		if _, err := w.Write(content); err != nil {
			return nil, err
		}
	}
	err := w.Close()
	return out.Bytes(), err
}
