// Command fake-gpu-driver offers the fake GPUs of one node to resource claims; it gives containers no device.
package main

import (
	"context"
	"flag"
	"fmt"
	"log"
	"os"
	"os/signal"
	"path/filepath"
	"syscall"

	resourceapi "k8s.io/api/resource/v1"
	"k8s.io/apimachinery/pkg/types"
	"k8s.io/client-go/kubernetes"
	"k8s.io/client-go/tools/clientcmd"
	"k8s.io/dynamic-resource-allocation/kubeletplugin"
	"k8s.io/dynamic-resource-allocation/resourceslice"
)

type driver struct{ name string }

func (d driver) PrepareResourceClaims(
	_ context.Context, claims []*resourceapi.ResourceClaim,
) (map[types.UID]kubeletplugin.PrepareResult, error) {
	results := map[types.UID]kubeletplugin.PrepareResult{}
	for _, claim := range claims {
		var devices []kubeletplugin.Device
		for _, each := range claim.Status.Allocation.Devices.Results {
			if each.Driver == d.name {
				devices = append(devices, kubeletplugin.Device{
					Requests: []string{each.Request}, PoolName: each.Pool, DeviceName: each.Device,
				})
			}
		}
		results[claim.UID] = kubeletplugin.PrepareResult{Devices: devices}
	}
	return results, nil
}

func (driver) UnprepareResourceClaims(
	_ context.Context, claims []kubeletplugin.NamespacedObject,
) (map[types.UID]error, error) {
	results := map[types.UID]error{}
	for _, claim := range claims {
		results[claim.UID] = nil
	}
	return results, nil
}

func (driver) HandleError(_ context.Context, err error, message string) {
	log.Printf("%s: %v", message, err)
}

func run() error {
	name := flag.String("driver", "gpu.amd.com", "name of the driver")
	node := flag.String("node", "", "name of the node")
	count := flag.Int("count", 8, "number of GPUs")
	kubelet := flag.String("kubelet", "/var/lib/kubelet", "root folder of the node's kubelet")
	kubeconfig := flag.String("kubeconfig", "", "kubeconfig that may write ResourceSlices")
	flag.Parse()
	config, err := clientcmd.BuildConfigFromFlags("", *kubeconfig)
	if err != nil {
		return err
	}
	client, err := kubernetes.NewForConfig(config)
	if err != nil {
		return err
	}
	data := filepath.Join(*kubelet, "plugins", *name)
	if err := os.MkdirAll(data, 0o700); err != nil {
		return err
	}
	ctx, stop := signal.NotifyContext(context.Background(), syscall.SIGTERM, syscall.SIGINT)
	defer stop()
	helper, err := kubeletplugin.Start(
		ctx, driver{*name},
		kubeletplugin.DriverName(*name),
		kubeletplugin.KubeClient(client),
		kubeletplugin.NodeName(*node),
		kubeletplugin.PluginDataDirectoryPath(data),
		kubeletplugin.RegistrarDirectoryPath(filepath.Join(*kubelet, "plugins_registry")),
	)
	if err != nil {
		return err
	}
	defer helper.Stop()
	devices := make([]resourceapi.Device, *count)
	for number := range devices {
		devices[number].Name = fmt.Sprintf("gpu-%d", number)
	}
	slices := []resourceslice.Slice{{Devices: devices}}
	pools := map[string]resourceslice.Pool{*node: {Slices: slices}}
	if err := helper.PublishResources(ctx, resourceslice.DriverResources{Pools: pools}); err != nil {
		return err
	}
	<-ctx.Done()
	return nil
}

func main() {
	if err := run(); err != nil {
		log.Fatal(err)
	}
}
